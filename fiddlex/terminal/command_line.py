"""The command line of the programs that take a config: `--config=NAME` and `--config.section.field=value`.

`ml_collections.config_flags` parses it, so all of that library's syntax is valid: `--config=file.py:argument`,
`--config.mesh.pipe 4`, `--noconfig.mesh.sequence_parallel`. Overrides may also precede `--config`. Invariant: a mistake
in the command line, in a config file or in the program's input ends the program with a message of one or two lines and
no traceback; a traceback is a bug of fiddlex.
"""

import functools
import os
import signal
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, NoReturn

from absl import app, command_name, flags
from ml_collections import config_flags

from fiddlex.config import Config, rules
from fiddlex.config.files import load_config
from fiddlex.config.overrides import overridden
from fiddlex.config.unused import reset_unused, unused
from fiddlex.config.user_code.registries import added
from fiddlex.config.values.every import Every
from fiddlex.errors import ConfigError, DataError, FiddlexError, ScheduleError, Stopped
from fiddlex.terminal import interrupts, library_log, progress
from fiddlex.terminal.arguments import file_first, split_program
from fiddlex.terminal.displays import is_terminal
from fiddlex.terminal.ending import crashed, end, finished
from fiddlex.terminal.flag_hints import Stray
from fiddlex.terminal.help import help_text
from fiddlex.terminal.log import show_log
from fiddlex.terminal.memory_advice import is_lack_of_memory, memory_remedies
from fiddlex.terminal.mistakes import explain, explain_stray, surplus, unknown_field
from fiddlex.terminal.streams import print_any_text

USAGE_STATUS = 2  # the command line, the config or the data are wrong; `launch` does not try again
FAILURE_STATUS = 1  # any other FiddlexError, and a DataError whose cause may pass
INTERRUPTED_STATUS = 130  # Ctrl-C, the status that shells report
_MISTAKES = (ConfigError, DataError, ScheduleError)
# Reasons of the system that remain until somebody mends the path or its permissions. A full disk or a failed read may
# pass.
_LASTING = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)


_OF_WORKDIR = (
    "the run's config file, where that registers the model's family or the schedule and was moved or changed; "
    "--config.section.field=value overrides the config of the workdir"
)

flags.disclaim_key_flags()  # --help lists --config under the binary that defines it


class _EveryParser(flags.ArgumentParser):
    def parse(self, argument: int | str) -> Every:
        try:
            return Every(argument)
        except ValueError:
            raise ValueError(f"{argument!r} is no number of steps") from None


config_flags.register_flag_parser_for_type(Every, _EveryParser())


class _PathParser(flags.ArgumentParser):
    """Reads a path, whose `~` no shell expands after `--name=`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def parse(self, argument: str) -> str:
        rules.local_path(f"--{self._name}", argument)
        return os.path.expanduser(argument)


class _RegisteringParser(flags.ArgumentParser):
    """Runs a config file for what it adds to a registry."""

    def __init__(self, registry: Mapping[str, Any]) -> None:
        self._registry = registry

    def parse(self, argument: str) -> str:
        before = dict(self._registry)
        load_config(argument)
        if before == self._registry:
            raise ConfigError(
                f"--config={argument}: the file registers no schedule, and nothing else of it is used here."
            )
        return argument


def define_config(*, required: bool = True) -> flags.FlagHolder[Config]:
    """Defines `--config`, with overrides; for programs that start from a config (`load_config`).

    If it is `required`, the program refuses to start without it. The flag's value is that config with the command
    line's overrides applied, not yet validated. Fields of the file that the overrides make a run ignore have their
    defaults (`run`).
    """
    text = "name that `fiddlex configs` lists, or file.py, with :argument; --config.section.field=value overrides it"
    holder = _define(text, load_config)
    if required:
        flags.mark_flag_as_required(holder)
    return holder


def define_overrides() -> None:
    """Defines `--config.section.field=value`; for programs that read a workdir's config (`apply_overrides`).

    `--config=file.py` is run for the model families and the schedules that it registers, and gives no values. It goes
    before the file that the workdir names (`fiddlex.train.run.registered`).
    """

    def registered(spec: str) -> Config:
        before = added()
        load_config(spec)
        if before == added():
            _refuse_file("takes its config from the workdir, and the file registers no family and no schedule", spec)
        return Config()

    _define(_OF_WORKDIR, registered)


def define_changes(config: Config) -> flags.FlagHolder[Config]:
    """Defines `--config.section.field=value` alone; for programs with a `config` of their own, which `--help` shows.

    The flag's value is a copy of `config` with the command line's overrides applied, not yet validated.
    """
    text = "only as --config.section.field=value, which changes the program's own config"
    return _define(text, functools.partial(_refuse_file, "has a config of its own"), config)


def define_registering(registry: Mapping[str, Any]) -> None:
    """Defines `--config=file.py`, run for the schedules that it adds to `registry`; for programs without a config."""
    flags.DEFINE(
        _RegisteringParser(registry), "config", None, "config file that registers the name of a schedule of your own"
    )


def define_path(name: str, default: str | None, help_text: str, *, required: bool = False) -> flags.FlagHolder[str]:
    """Defines a flag whose value is the path of a file or folder; `~` at its beginning is the user's home."""
    return flags.DEFINE(_PathParser(name), name, default, help_text, required=required)


def define_workdir(help_text: str) -> flags.FlagHolder[str]:
    """Defines the required `--workdir`, which must not be empty."""
    holder = define_path("workdir", None, help_text, required=True)
    flags.register_validator(
        holder, lambda value: value is None or bool(value), "--workdir is empty; name a directory."
    )
    return holder


def apply_overrides(config: Config) -> Config:
    """A copy of `config` with the overrides applied, not yet validated; ConfigError when a run would ignore one."""
    given = config_flags.get_override_values(flags.FLAGS["config"])
    config = overridden(config, given)
    for field in unused(config):
        if field.path in given:
            raise ConfigError(field.message)
    return config


def run(main: Callable[[list[str]], None]) -> NoReturn:
    """Parses the flags, calls `main` and exits like `absl.app.run`, but prints messages instead of tracebacks.

    The exit status is `USAGE_STATUS` for flags that cannot be parsed and for every ConfigError, DataError or
    ScheduleError, except for a DataError whose cause is an OSError that may pass, such as a full disk. It is
    `FAILURE_STATUS` for these and any other FiddlexError that `main` raises, and when standard output cannot be
    written. A standard error that cannot be written changes nothing.

    `main` takes a list of the program's name, the positional arguments, and what follows `--`; `--help` shows the
    docstring and the flags of its module. That module may say in `ARGUMENT` what the first positional argument is,
    which must then be given; in `MORE_ARGUMENTS` how many may follow it, by default none; and with `TAKES_PROGRAM` that
    `--` and another program's command line may follow. Any further positional argument is an error, whose message
    proposes the flag that the module names in `STRAY_ARGUMENT`.
    """

    def call(argv: list[str]) -> None:
        try:
            main(argv)
        except Exception as error:
            if interrupts.is_interrupted():
                raise KeyboardInterrupt from error
            if is_lack_of_memory(error):
                # Threads of the backend may hang now, so exit without waiting for them.
                flag = flags.FLAGS["config"] if "config" in flags.FLAGS else None  # noqa: SIM401  # `get` gives the value
                config = None if flag is None or flag.help == _OF_WORKDIR else flag.value
                trained = config if isinstance(config, Config) else None  # and not a file's name alone
                advice = _memory_advice(trained, sys.modules["jax"].default_backend())
                lines = [f"{os.path.basename(sys.argv[0])}: {advice}", *getattr(error, "__notes__", ())]
                sys.stderr.write("\n".join([*lines, str(error).splitlines()[0], ""]))
                _end_library_log(failed=True)
                sys.stderr.flush()
                os._exit(FAILURE_STATUS)
            raise

    def guarded(argv: list[str]) -> None:
        if "config" in flags.FLAGS and isinstance(config := flags.FLAGS["config"].value, Config):
            reset_unused(config, by=config_flags.get_override_values(flags.FLAGS["config"]))
        show_log()
        progress.show_in_log()
        failed = True
        try:
            try:
                call(argv)
                failed = False
            except SystemExit as ended:
                failed = False
                finished(ended.code if isinstance(ended.code, int) else FAILURE_STATUS if ended.code else 0)
                raise
            sys.stdout.flush()
            finished(0)
        except FiddlexError as error:
            end(str(error), _status(error))
        except BrokenPipeError:  # the reader of our output, such as `head`, has exited
            _leave_output()
            sys.exit(FAILURE_STATUS)
        except OSError as error:  # a full disk, an unreadable file: a traceback would explain nothing
            end(str(error), FAILURE_STATUS)
        except KeyboardInterrupt:
            failed = False
            end("interrupted.", INTERRUPTED_STATUS)
        except Exception as error:
            crashed(error)
            raise
        finally:
            _end_library_log(failed=failed)
            try:
                sys.stdout.flush()
            except OSError:  # reported already, or less important than the status of a program that was stopped
                _leave_output()

    print_any_text()
    signal.signal(signal.SIGINT, _interrupt)
    if is_terminal():  # which a program that a signal kills would leave without a cursor
        for number in set(interrupts.ENDING).intersection(interrupts.stop_signals()):
            signal.signal(number, _interrupt)
    interrupts.watch()
    try:
        app.run(guarded, flags_parser=functools.partial(_parse_flags, module=main.__module__))
    except SystemExit as ended:
        interrupts.leave_if_interrupted(ended.code)
        raise


def _status(error: FiddlexError) -> int:
    cause: BaseException | None = error
    while isinstance(cause, DataError):  # one may add to the message of another
        cause = cause.__cause__
    # An OSError without a number is a library's, such as gzip's of a damaged file.
    may_pass = isinstance(cause, OSError) and cause.errno is not None and not isinstance(cause, _LASTING)
    return USAGE_STATUS if isinstance(error, _MISTAKES) and not may_pass else FAILURE_STATUS


def _interrupt(number: int, frame: FrameType | None) -> None:
    if interrupts.postponed(number):
        return
    if number == signal.SIGINT:
        interrupts.interrupt(KeyboardInterrupt)
    else:
        interrupts.interrupt(Stopped, number)


def _end_library_log(*, failed: bool) -> None:
    if failed and (text := library_log.told()):
        sys.stderr.write(f"{text}\n")
    library_log.end(failed=failed)


def _memory_advice(config: Config | None, platform: str) -> str:
    """What the user can do about a lack of memory on `platform`; without a `config`, the program does not train."""
    fake = platform == "cpu"
    if config is None:
        remedies = ["end other programs that use it", "lower data.global_batch_size (for an evaluation)"]
    else:
        remedies = list(memory_remedies(config, fake=fake))
    where = "The machine's memory, which the fake devices share," if fake else "The memory of a device"
    return f"{where} is full: {', or '.join(remedies)}."


def _define(
    help_text: str, parse_file: Callable[[str], Config], default: Config | None = None
) -> flags.FlagHolder[Config]:
    # On an override that names no field, config_flags fails with a KeyError, sometimes while the binary is still being
    # imported. We hide such overrides from it; they reach absl as unknown flags, which `explain` reports.
    try:
        arguments = file_first(sys.argv)
    except flags.Error as error:  # a --flagfile that cannot be read
        end(str(error), USAGE_STATUS)
    shown = [argument for argument in arguments if unknown_field(argument) is None]
    holder = config_flags.DEFINE_config_dataclass(
        "config", default or Config(), help_text, sys_argv=shown, parse_fn=parse_file
    )
    # The default Config gave config_flags the types of the fields; a run without a config file must not train it.
    if default is None:
        flags.set_default(holder, None)
    return holder


def _refuse_file(home: str, spec: str) -> NoReturn:
    raise ConfigError(
        f"--config={spec}: this program {home}. Override single fields of it, as --config.section.field=value."
    )


def _leave_output() -> None:
    """Redirects standard output to the null device."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _HelpFlag(flags.BooleanFlag):
    """`--help` and `-h` in place of absl's, which does not show configs and exits with status 1."""

    def __init__(self, module: str, name: str = "help", short_name: str | None = "h") -> None:
        super().__init__(name, False, "show this help", short_name=short_name, allow_override=True)
        self._module = module

    def parse(self, arg: str | bool) -> None:
        if self._parse(arg):
            try:
                print(help_text(self._module), flush=True)
            except BrokenPipeError:
                _leave_output()
            except OSError as error:  # a full disk
                _leave_output()
                end(str(error), FAILURE_STATUS)
            sys.exit()


def _parse_flags(argv: list[str], *, module: str) -> list[str]:
    # absl has put "fiddlex train" into the kernel's table of processes, which many programs split at blanks.
    command_name.set_kernel_process_name(os.path.basename(sys.argv[0]).replace(" ", "-"))
    argument: str = getattr(sys.modules[module], "ARGUMENT", "")
    takes_program = hasattr(sys.modules[module], "TAKES_PROGRAM")
    _, program = split_program(argv)
    for help_flag in (_HelpFlag(module), *(_HelpFlag(module, name, None) for name in ("helpshort", "helpfull"))):
        flags.DEFINE_flag(help_flag)
    flags.FLAGS.set_gnu_getopt(True)  # otherwise absl silently ignores all flags after a positional argument
    try:
        remaining = flags.FLAGS(file_first(argv))
    except (flags.Error, ValueError) as error:  # absl raises a bare ValueError for --noflag=value
        end(explain(error, module), USAGE_STATUS)
    except KeyboardInterrupt:  # while a config file runs
        end("interrupted.", INTERRUPTED_STATUS)
    if argument and not remaining[1:]:
        end(f"an argument is missing, {argument}.", USAGE_STATUS)
    stray = surplus(module) + [Stray(text, "") for text in program if not takes_program]
    if stray:
        end(explain_stray(stray[0], module, []), USAGE_STATUS)
    return remaining + program
