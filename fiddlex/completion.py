"""What a shell offers after `fiddlex …` when the user presses Tab.

The shell's script (`fiddlex completion bash`) calls `fiddlex` with the line so far, in variables that the library
argcomplete reads. The candidates come from an argparse parser, which is made of the sub-command's absl flags and of the
fields of its config. Only that sub-command's module is imported, and no jax.
"""

import argparse
import contextlib
import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import argcomplete
from absl import flags
from argcomplete.completers import FilesCompleter

from fiddlex.commands import summaries
from fiddlex.config import Config, sections
from fiddlex.config.families import FAMILIES, OBJECTIVES
from fiddlex.config.files import config_names, describe
from fiddlex.config.values.recompute import MODES, PARTS
from fiddlex.config.values.source import KINDS
from fiddlex.config.values.stash import STASH_DTYPES
from fiddlex.hardware.topology import catalogue
from fiddlex.schedules.generators import GENERATORS
from fiddlex.schedules.semantics import NAMES
from fiddlex.terminal.help import takes_file

_Completer = Callable[..., Iterable[str]]
_FIELD_PREFIXES = "--config.", "--noconfig."


def complete(line: str) -> NoReturn:
    """Writes the candidates for the line so far to the shell's script, and ends the process.

    Args:
      line: the command line, as the shell's script passes it on.
    """
    words = line.split()
    _Finder()(make_parser(words[1] if len(words) > 1 else ""), always_complete_options="long")
    sys.exit("fiddlex completes only for a shell that loaded the script of `fiddlex completion`.")


def make_parser(command: str) -> argparse.ArgumentParser:
    """A parser of fiddlex's command line, with the flags of one sub-command only."""
    parser = argparse.ArgumentParser("fiddlex", add_help=False, allow_abbrev=False)
    parser.add_argument("--help", action="store_true", help="list the commands")
    parser.add_argument("--version", action="store_true", help="show the version")
    commands = parser.add_subparsers()
    for name, summary in summaries():
        sub = commands.add_parser(name, help=_escaped(summary), add_help=False, allow_abbrev=False)
        if name == command:
            _add_command(sub, name)
    return parser


def _add_command(parser: argparse.ArgumentParser, name: str) -> None:
    """Adds what a sub-command takes to its parser."""
    sys.argv = [f"fiddlex {name}"]  # absl reads it as the module is imported; no override must reach it
    module = importlib.import_module(f"fiddlex.commands.{name}")
    parser.add_argument("--help", action="store_true", help="show the help of the command")
    if argument := getattr(module, "ARGUMENT", ""):
        parser.add_argument("argument", help=argument, choices=module.ARGUMENT_CHOICES)
    if hasattr(module, "MORE_ARGUMENTS"):
        files = parser.add_argument("more", nargs="*")
        files.completer = FilesCompleter()  # type: ignore[attr-defined]
    for flag in flags.FLAGS.get_key_flags_for_module(module.__name__):
        if flag.name == "config":
            if takes_file(flag):
                _add(parser, "config", flag.help, _configs)
            for section in dataclasses.fields(Config):
                for field in dataclasses.fields(section.default_factory):  # type: ignore[arg-type]
                    _add_field(parser, f"{section.name}.{field.name}", field.default)
        elif flag.boolean:
            _add_switch(parser, flag.name, flag.help)
        else:
            _add(parser, flag.name, flag.help, _completer_of(flag))


def _add_field(parser: argparse.ArgumentParser, name: str, default: object) -> None:
    if isinstance(default, bool):
        _add_switch(parser, f"config.{name}", f"default {default}")
    else:
        files = FilesCompleter() if isinstance(default, str) else None
        _add(parser, f"config.{name}", f"default {default!r}", _FIELDS.get(name, files))


def _add_switch(parser: argparse.ArgumentParser, name: str, text: str) -> None:
    parser.add_argument(f"--{name}", f"--no{name}", action="store_true", help=_escaped(text))


def _add(parser: argparse.ArgumentParser, name: str, text: str, completer: _Completer | None) -> None:
    """Adds a flag that takes a value; `completer` is None where nothing is known of the value."""
    action = parser.add_argument(f"--{name}", help=_escaped(text))
    action.completer = completer or _nothing  # type: ignore[attr-defined]


def _completer_of(flag: flags.Flag) -> _Completer | None:
    """What completes the value of a flag: names where they are known, files for other strings."""
    if flag.name in _FLAGS:
        return _FLAGS[flag.name]
    parser: Any = flag.parser
    if hasattr(parser, "enum_values"):
        return _one_of(parser.enum_values)
    return None if isinstance(parser, flags.IntegerParser | flags.FloatParser) else FilesCompleter()


def _one_of(names: Iterable[str], *, files: Iterable[str] = ()) -> _Completer:
    """Completes names, and files: either by themselves (`""`) or after a prefix such as `text:`."""

    def complete(prefix: str, **ignored: object) -> Iterator[str]:
        yield from names
        for kind in files:
            if prefix.startswith(kind):
                yield from (f"{kind}{path}" for path in FilesCompleter()(prefix.removeprefix(kind)))
            else:
                yield kind

    return complete


def _several(completer: _Completer) -> _Completer:
    """Completes the last of several values that are separated by commas."""

    def complete(prefix: str, **ignored: object) -> Iterator[str]:
        before, comma, last = prefix.rpartition(",")
        yield from (f"{before}{comma}{value}" for value in completer(prefix=last))

    return complete


def _configs(prefix: str, **ignored: object) -> Iterator[str]:
    """Completes names of configs, their arguments, and Python files; files for arguments that no config lists."""
    named, colon, argument = prefix.partition(":")
    if colon:
        with contextlib.suppress(Exception):  # the file is missing or wrong
            config = describe(named)
            values = filter(None, config.arguments) if config.arguments else FilesCompleter()(argument)
            yield from (f"{named}:{value}" for value in values if config.parameter)
    else:
        yield from config_names()
        yield from FilesCompleter(["py"])(prefix)


def _nothing(**ignored: object) -> list[str]:
    return []


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("%", "%%")  # argparse formats help


_SOURCES = _one_of(["stdlib"], files=[f"{name}:" for name, kind in KINDS.items() if kind.place])
_SEMANTICS = _one_of([name.removesuffix("K") for name in NAMES[:-1]])  # delay:K, and no function
_NAMES = _one_of([*GENERATORS, "auto"], files=["file:"])


def _schedules(prefix: str, **ignored: object) -> Iterator[str]:
    """Completes names of schedules, tables in files, and Python files, in which a function may make a schedule."""
    yield from _NAMES(prefix=prefix)
    yield from FilesCompleter(["py"])(prefix)


_FLAGS: dict[str, _Completer] = {
    "name": _schedules,
    "compare": _several(_schedules),
    "schedule": _schedules,
    "topology": _one_of(catalogue(), files=[""]),
    "semantics": _SEMANTICS,
}
_FIELDS: dict[str, _Completer] = {
    "model.family": _one_of(FAMILIES),
    "model.objective": _one_of(OBJECTIVES),
    "model.dtype": _one_of(sections.COMPUTE_DTYPES),
    "model.gelu": _one_of(sections.GELUS),
    "model.rope_scaling": _one_of(sections.ROPE_SCALINGS),
    "pipeline.schedule": _schedules,
    "pipeline.recompute": _one_of([*MODES, *PARTS]),
    "pipeline.stash_dtype": _one_of(STASH_DTYPES),
    "pipeline.semantics": _SEMANTICS,
    "pipeline.prediction": _one_of(sections.PREDICTIONS),
    "optimizer.name": _one_of(sections.OPTIMIZERS),
    "optimizer.schedule": _one_of(sections.LEARNING_RATE_SCHEDULES),
    "data.source": _SOURCES,
    "data.eval_source": _SOURCES,
}


class _Finder(argcomplete.CompletionFinder):
    """Ends flags that take a value with `=`, and offers fields only to a word that begins as they do."""

    def collect_completions(
        self, active_parsers: list[argparse.ArgumentParser], parsed_args: argparse.Namespace, cword_prefix: str
    ) -> list[str]:
        found = super().collect_completions(active_parsers, parsed_args, cword_prefix)
        if not cword_prefix.startswith("-") or "=" in cword_prefix:
            return found
        flags_alone = [flag for flag in found if not flag.startswith(_FIELD_PREFIXES)]
        if flags_alone and not cword_prefix.startswith(("--config", "--noconfig")):
            found = flags_alone
        switches = {
            option for action in active_parsers[-1]._actions if action.nargs == 0 for option in action.option_strings
        }
        return [flag if flag in switches else f"{flag}=" for flag in found]
