"""Config files: those that fiddlex comes with, by name, and files of your own, by path.

A config file has a function `get_config` that returns a `Config`. If it takes an argument, which is a string, the file
may list the valid ones in `ARGUMENTS`, with `""` where the argument may be left out.

The folder `configs` of the repository is the folder `fiddlex/configs` of an installed package.
"""

import dataclasses
import difflib
import inspect
import os
import pathlib
import reprlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import fiddlex
from fiddlex.config import Config, rules
from fiddlex.config.records import from_mapping
from fiddlex.config.user_code.python_files import errors_of, run_file, similar_file
from fiddlex.config.user_code.registries import running
from fiddlex.errors import ConfigError

_ARGUMENTS = "ARGUMENTS"


class NamedConfig(NamedTuple):
    """A config that fiddlex comes with."""

    name: str  # what `--config` takes
    arguments: tuple[str, ...]  # that the file lists; `""` where the argument may be left out
    parameter: str  # what `get_config` calls its argument; empty if it takes none
    summary: str  # the first line of the file's docstring


def named_configs() -> Iterator[NamedConfig]:
    return map(describe, config_names())


def config_names() -> list[str]:
    """The names of the configs that fiddlex comes with, in alphabetical order."""
    return sorted(path.stem for path in _folder().glob("*.py"))


def describe(named: str) -> NamedConfig:
    """What a config file, named by its path or its name, says of itself; ConfigError when there is none."""
    contents = run_file(_find(named))
    parameters = inspect.signature(contents["get_config"]).parameters
    summary = (contents["__doc__"] or "").strip().partition("\n")[0]
    return NamedConfig(named, tuple(contents.get(_ARGUMENTS, ())), next(iter(parameters), ""), summary)


def load_config(spec: str) -> Config:
    """Runs the config file of `--config`; returns a copy of what its `get_config` returned.

    Args:
      spec: `file.py`, or the name of a config that fiddlex comes with; `file.py:argument` or `name:argument` where the
        file's `get_config` takes an argument (a string). A file that exists goes before a name.

    Raises:
      ConfigError: when the file is missing, fails or ends the program (the message names the line), does not take the
        argument, or does not return a `Config`. A FiddlexError that the file itself raises is passed on unchanged.
    """
    rules.local_path("--config", spec)
    named, colon, argument = spec.partition(":")
    path = _find(named)
    with running(f"{os.path.abspath(path)}{colon}{argument}"):
        return _loaded(path, named, argument, is_given=bool(colon))


def _loaded(path: str, named: str, argument: str, *, is_given: bool) -> Config:
    """What `get_config` of a file returns, with the argument if one is given."""
    with errors_of(path):
        contents = run_file(path)
        is_taken = argument in contents.get(_ARGUMENTS, (argument,))
    get_config = contents.get("get_config")
    if not callable(get_config):
        raise ConfigError(f"{path} has no function get_config(); --config needs one that returns a Config.")
    if not is_taken:
        raise ConfigError(_wrong_argument(named, argument, contents[_ARGUMENTS]))
    with errors_of(path):
        config = get_config(argument) if is_given else get_config()
        if type(config) is Config:  # validates the types again, whatever the file did to the sections
            return from_mapping(Config, dataclasses.asdict(config), "config.")
    only = " itself, not of a subclass" if isinstance(config, Config) else ""
    raise ConfigError(f"get_config() of {path} returned {reprlib.repr(config)}; it must return a Config{only}.")


def _folder() -> pathlib.Path:
    package = pathlib.Path(fiddlex.__file__).parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"  # of a checkout


def _find(named: str) -> str:
    """The path of a config file that is named by its path or its name."""
    named = os.path.expanduser(named)  # no shell expands ~ after --config=
    if os.path.isfile(named):
        return named
    known = config_names()
    if named in known:
        return str(_folder() / f"{named}.py")
    if os.path.isdir(named):
        raise ConfigError(
            f"--config={named} is a folder. Name a file in it, as in --config={named.rstrip('/')}/config.py."
        )
    if not named:
        raise ConfigError("--config is empty. Name a config that `fiddlex configs` lists, as in --config=gpt_tiny.")
    stem = os.path.basename(named).removesuffix(".py")
    if named != stem:
        comes = f" fiddlex comes with a config of that name: --config={stem}." if stem in known else ""
        raise ConfigError(f"there is no config file {os.path.abspath(named)}.{similar_file(named)}{comes}")
    close = difflib.get_close_matches(named, known, n=3)
    near = f" Did you mean {' or '.join(close)}?" if close else ""
    raise ConfigError(
        f"there is no config {named!r}.{near} `fiddlex configs` lists those that fiddlex comes with. Name a file of "
        "your own by its path, as in --config=my/config.py."
    )


def _wrong_argument(named: str, argument: str, arguments: Sequence[str]) -> str:
    choices = f"--config={named}:{'|'.join(filter(None, arguments))}"
    if "" in arguments:
        choices = f"--config={named} or {choices}"
    problem = f"takes no argument {argument!r}" if argument else "needs an argument"
    return f"the config {named} {problem}; use {choices}."
