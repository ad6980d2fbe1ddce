"""The command line of `fiddlex train` and its like: `--config=file.py` and `--config.section.field=value`.

`ml_collections.config_flags` parses it, so all of that library's syntax is valid: `--config=file.py:argument`,
`--config.mesh.pipe 4`, `--noconfig.mesh.sequence_parallel`. Overrides may also precede `--config`. Invariant: a mistake
in the command line, in a config file or in the program's input ends the program with a message of one or two lines and
no traceback; a traceback is a bug of fiddlex.
"""

import dataclasses
import difflib
import functools
import gc
import itertools
import operator
import os
import re
import reprlib
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from absl import app, flags
from ml_collections import config_flags

from fiddlex.config import Config
from fiddlex.config.config import check_field
from fiddlex.config.help import help_text
from fiddlex.config.log import show_log
from fiddlex.config.memory_advice import memory_remedies
from fiddlex.config.overrides import is_field, override, replaced
from fiddlex.config.records import from_mapping
from fiddlex.errors import ConfigError, FiddlexError, ScheduleError

USAGE_STATUS = 2  # the command line or the config is wrong
FAILURE_STATUS = 1  # any other FiddlexError
INTERRUPTED_STATUS = 130  # Ctrl-C, the status that shells report

_CONFIG_FILE = re.compile(r"--?config(=|$)")
_OVERRIDE = re.compile(r"-{0,2}(?:no)?config\.([^=]*)")
_LACK_OF_MEMORY = re.compile("RESOURCE_EXHAUSTED|Out of memory", re.IGNORECASE)  # the second is in INTERNAL errors

flags.disclaim_key_flags()  # --help lists --config under the binary that defines it


def define_config() -> flags.FlagHolder[Config]:
    """Defines the required `--config=file.py`, with overrides; for programs that start from a config file.

    Returns:
      The flag. Its value is the file's config with the command line's overrides applied, not yet validated.
    """
    holder = _define("config file, file.py or file.py:argument; --config.section.field=value overrides it", load_config)
    flags.mark_flag_as_required(holder)
    return holder


def define_overrides() -> None:
    """Defines `--config.section.field=value` alone; for programs that read a workdir's config (`apply_overrides`)."""
    text = "only as --config.section.field=value, which overrides the config of the workdir"
    _define(text, functools.partial(_refuse_file, "takes its config from the workdir"))


def define_changes(config: Config) -> flags.FlagHolder[Config]:
    """Defines `--config.section.field=value` alone; for programs with a config of their own.

    Args:
      config: the program's own config; `--help` shows its values.

    Returns:
      The flag. Its value is a copy of `config` with the command line's overrides applied, not yet validated.
    """
    text = "only as --config.section.field=value, which changes the program's own config"
    return _define(text, functools.partial(_refuse_file, "has a config of its own"), config)


def define_workdir(help_text: str) -> flags.FlagHolder[str]:
    """Defines the required `--workdir`, which must not be empty."""
    holder = flags.DEFINE_string("workdir", None, help_text, required=True)
    flags.register_validator(
        holder, lambda value: value is None or bool(value), "--workdir is empty; name a directory."
    )
    return holder


def apply_overrides(config: Config) -> Config:
    """A copy of `config` with the command line's overrides applied, not yet validated; see `define_overrides`."""
    return replaced(config, config_flags.get_override_values(flags.FLAGS["config"]))


def run(main: Callable[[list[str]], None]) -> NoReturn:
    """Parses the flags, calls `main` and exits like `absl.app.run`, but prints messages instead of tracebacks.

    The exit status is `USAGE_STATUS` for flags that cannot be parsed and for every ConfigError or ScheduleError. It is
    `FAILURE_STATUS` for any other FiddlexError that `main` raises, and when standard output cannot be written. A
    standard error that cannot be written changes nothing. Positional arguments are an error: absl would silently ignore
    all flags after the first of them.

    Args:
      main: takes a list that holds the program's name, as with absl. `--help` shows the docstring and the flags of the
        module that defines it.
    """

    def call(argv: list[str]) -> None:
        try:
            main(argv)
        except Exception as error:
            if type(error).__name__ == "JaxRuntimeError" and _LACK_OF_MEMORY.search(str(error)):
                # Threads of the backend may hang now, so exit without waiting for them.
                advice = _memory_advice(flags.FLAGS["config"].value, sys.modules["jax"].default_backend())
                sys.stderr.write(f"{os.path.basename(sys.argv[0])}: {advice}\n{str(error).splitlines()[0]}\n")
                sys.stderr.flush()
                os._exit(FAILURE_STATUS)
            raise

    def guarded(argv: list[str]) -> None:
        show_log()
        try:
            call(argv)
            sys.stdout.flush()
        except FiddlexError as error:
            _exit(str(error), USAGE_STATUS if isinstance(error, ConfigError | ScheduleError) else FAILURE_STATUS)
        except BrokenPipeError:  # the reader of our output, such as `head`, has exited
            _leave_output()
            sys.exit(FAILURE_STATUS)
        except OSError as error:  # a full disk, an unreadable file: a traceback would explain nothing
            _exit(str(error), FAILURE_STATUS)
        except KeyboardInterrupt:
            _exit("interrupted.", INTERRUPTED_STATUS)
        finally:
            try:
                sys.stdout.flush()
            except OSError:  # reported already, or less important than the status of a program that was stopped
                _leave_output()

    signal.signal(signal.SIGINT, _interrupt)
    app.run(guarded, flags_parser=functools.partial(_parse_flags, module=main.__module__))


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Handles Ctrl-C: raises KeyboardInterrupt, or tries again a moment later where Python would ignore it.

    Python ignores it in callbacks of the garbage collector; jax has one, which runs often while jax is imported.
    """
    callbacks = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    while frame is not None:
        if frame.f_code in callbacks:
            threading.Timer(0.01, os.kill, (os.getpid(), number)).start()
            return
        frame = frame.f_back
    raise KeyboardInterrupt


def load_config(spec: str) -> Config:
    """Runs the config file of `--config`.

    Args:
      spec: `file.py`, or `file.py:argument` where the file's `get_config` takes an argument (a string).

    Returns:
      A copy of what `get_config` returned.

    Raises:
      ConfigError: when the file is missing, fails or ends the program (the message names the line), or does not return
        a `Config`. A FiddlexError that the file itself raises is passed on unchanged.
    """
    path, colon, argument = spec.partition(":")
    if not os.path.isfile(path):
        raise ConfigError(f"there is no config file {os.path.abspath(path)}.{_similar_file(path)}")
    try:
        get_config = runpy.run_path(path).get("get_config")
        if not callable(get_config):
            raise ConfigError(f"{path} has no function get_config(); --config needs one that returns a Config.")
        config = get_config(argument) if colon else get_config()
        if type(config) is Config:  # validates the types again, whatever the file did to the sections
            return from_mapping(Config, dataclasses.asdict(config), "config.")
    except FiddlexError as error:
        frames = traceback.extract_tb(error.__traceback__)
        if not isinstance(error, ConfigError) or frames[-1].filename in (path, __file__):
            raise
        raise ConfigError(f"{_place(path, error)}: {error}") from error  # raised where the file sets a field
    except SyntaxError as error:
        place = f"{error.filename}, line {error.lineno}" if error.filename else _place(path, error)
        raise ConfigError(f"{place}: {error.msg}.") from error
    except SystemExit as error:
        raise ConfigError(
            f"{_place(path, error)}: SystemExit({error.code!r}) would end the program. A config file must not exit: "
            "return a Config, or raise fiddlex.errors.ConfigError with what is wrong."
        ) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ConfigError(f"{_place(path, error)}: {type(error).__name__}: {error}") from error
    only = " itself, not of a subclass" if isinstance(config, Config) else ""
    raise ConfigError(f"get_config() of {path} returned {reprlib.repr(config)}; it must return a Config{only}.")


def _place(path: str, error: BaseException) -> str:
    """The config file, with its last line that was running when `error` was raised."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return f"{path}, line {lines[-1]}" if lines else path


def _memory_advice(config: Config | None, platform: str) -> str:
    """What the user can do about a lack of memory on `platform`; without a `config`, the program does not train."""
    fake = platform == "cpu"
    if config is None:
        remedies = ["end other programs that use it", "lower data.global_batch_size (for an evaluation)"]
    else:
        remedies = memory_remedies(config, fake=fake)
    where = "The machine's memory, which the fake devices share," if fake else "The memory of a device"
    return f"{where} is full: {', or '.join(remedies)}."


def _define(
    help_text: str, parse_file: Callable[[str], Config], default: Config | None = None
) -> flags.FlagHolder[Config]:
    # On an override that names no field, config_flags fails with a KeyError, sometimes while the binary is still being
    # imported. We hide such overrides from it; they reach absl as unknown flags, which `_explain` reports.
    try:
        arguments = _file_first(sys.argv)
    except flags.Error as error:  # a --flagfile that cannot be read
        _exit(str(error), USAGE_STATUS)
    shown = [argument for argument in arguments if _unknown_field(argument) is None]
    holder = config_flags.DEFINE_config_dataclass(
        "config", default or Config(), help_text, sys_argv=shown, parse_fn=parse_file
    )
    # The default Config gave config_flags the types of the fields; a run without a config file must not train it.
    if default is None:
        flags.set_default(holder, None)
    return holder


def _file_first(argv: list[str]) -> list[str]:
    """`argv` with its flag files expanded, and the last `--config` before all overrides, as config_flags requires.

    Raises:
      flags.Error: when a flag file cannot be read, or contains a NUL character.
    """
    try:
        program, *arguments = flags.FLAGS.read_flags_from_files(argv, force_gnu=False)
    except ValueError as error:
        raise flags.Error(
            f"a --flagfile cannot be read: {error}. Write it in UTF-8, without NUL characters."
        ) from error
    for argument in arguments:
        if "\0" in argument:
            raise flags.Error(f"{argument!r} contains a NUL character, which no command line can have. Remove it.")
    file: list[str] = []
    others = []
    remaining = iter(arguments)
    for argument in remaining:
        if _CONFIG_FILE.match(argument):
            file = [argument] if "=" in argument else [argument, *itertools.islice(remaining, 1)]
        else:
            others.append(argument)
    return [program, *file, *others]


def _refuse_file(home: str, spec: str) -> NoReturn:
    raise ConfigError(
        f"--config={spec}: this program {home}. Override single fields of it, as --config.section.field=value."
    )


def _unknown_field(argument: str) -> str | None:
    """What is wrong with the field that an override names; None when nothing is, or `argument` is no override."""
    override = _OVERRIDE.match(argument)
    if not override:
        return None
    path = override[1]
    try:
        check_field(path)
    except ConfigError as error:
        return str(error)
    section = operator.attrgetter(path)(Config())
    if dataclasses.is_dataclass(section):
        names = ", ".join(field.name for field in dataclasses.fields(section))
        return f"config.{path} is a section and has no value of its own. Set one of its fields: {names}."
    return None


def _leave_output() -> None:
    """Redirects standard output to the null device."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _HelpFlag(flags.BooleanFlag):
    """`--help` and `-h` in place of absl's, which does not show configs and exits with status 1."""

    def __init__(self, module: str) -> None:
        super().__init__("help", False, "show this help", short_name="h", allow_override=True)
        self._module = module

    def parse(self, arg: str | bool) -> None:
        if self._parse(arg):
            try:
                print(help_text(self._module), flush=True)
            except BrokenPipeError:
                _leave_output()
            sys.exit()


def _parse_flags(argv: list[str], module: str) -> list[str]:
    flags.DEFINE_flag(_HelpFlag(module))
    try:
        remaining = flags.FLAGS(_file_first(argv))
    except (flags.Error, ValueError) as error:  # absl raises a bare ValueError for --noflag=value
        _exit(_explain(error), USAGE_STATUS)
    except KeyboardInterrupt:  # while a config file runs
        _exit("interrupted.", INTERRUPTED_STATUS)
    if remaining[1:]:
        _exit(f"{remaining[1]!r} is not a flag. Write --name=value, and --name or --noname for a bool.", USAGE_STATUS)
    return remaining


def _explain(error: Exception) -> str:
    """The message of `error`, or a clearer one where fiddlex knows more than absl."""
    if isinstance(error.__context__, ConfigError):  # raised by load_config and wrapped by absl
        return str(error.__context__)
    if isinstance(error, flags.UnrecognizedFlagError):
        return _unknown_field(error.flagname) or str(error)
    if error.__context__ is None:  # a flag's validator failed, not the parsing of a value
        return _missing_flag() or str(error)
    return _wrong_value() or str(error)


def _wrong_value() -> str | None:
    """What is wrong with the value of the first override whose value is not of its field's type."""
    _, *arguments = _file_first(sys.argv)
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        match = _OVERRIDE.match(argument)
        if match is None or not is_field(match[1]):
            continue
        kind = type(operator.attrgetter(match[1])(Config()))
        if kind is bool and "=" not in argument:  # --config.… or --noconfig.…, which take no value
            continue
        value = argument.partition("=")[2] if "=" in argument else following
        try:
            override(Config(), f"{match[1]}={value}")
        except ConfigError:
            return f"config.{match[1]}={value!r} must be of type {kind.__name__}."
    return None


def _missing_flag() -> str | None:
    """The message for the first required flag that has no value."""
    for name in flags.FLAGS:
        flag = flags.FLAGS[name]
        for validator in flag.validators:
            try:
                validator.verify(flags.FLAGS)
            except flags.ValidationError:
                if flag.value is None:
                    return f"--{name} is required: {flag.help}."
    return None


def _similar_file(path: str) -> str:
    folder, name = os.path.split(path)
    entries = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
    close = difflib.get_close_matches(name, [entry for entry in entries if entry.endswith(".py")], n=1)
    return f" Did you mean {os.path.join(folder, close[0])}?" if close else ""


def _exit(message: str, status: int) -> NoReturn:
    sys.stderr.write(f"{os.path.basename(sys.argv[0])}: {message}\n")
    sys.exit(status)
