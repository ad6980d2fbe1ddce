"""The message for a command line that absl refuses: what was meant, where fiddlex knows more than absl."""

import dataclasses
import itertools
import operator
import sys
from collections.abc import Sequence

from absl import flags

from fiddlex.config import Config
from fiddlex.config.config import check_field, field_paths
from fiddlex.config.other_names import fields_meant
from fiddlex.config.overrides import is_field, override
from fiddlex.config.records import type_name
from fiddlex.errors import ConfigError
from fiddlex.terminal.arguments import OVERRIDE, file_first
from fiddlex.terminal.flag_hints import Stray, stray_argument, strays, unknown_flag, wrong_field_value, wrong_value
from fiddlex.terminal.help import is_required, own_flags


def explain(error: Exception, module: str) -> str:
    for told in (error, error.__context__):
        if isinstance(told, ConfigError):  # raised by a field, or by load_config and wrapped by absl
            return str(told)
    if isinstance(error, flags.UnrecognizedFlagError):
        if error.flagname[:1].isdecimal():
            return (
                f"-{error.flagname} is read as a flag, and there is none of that name. A number that is no flag's "
                f"value, such as a step, must be at least 0; a flag takes a value as in --name=-{error.flagname}."
            )
        first = getattr(sys.modules[module], "ARGUMENT", "")
        argument = str(error.flagvalue)
        following = next((b for a, b in itertools.pairwise(file_first(sys.argv)) if a == argument), "-")
        if "=" not in argument and not following.startswith("-"):
            argument = f"{argument}={following}"
        return unknown_field(error.flagname) or unknown_flag(
            error.flagname, argument, own_flags(module), positional=first
        )
    if (name := str(error).removeprefix("Missing value for flag ")) != str(error):
        return f"{name} has no value: write {name}=VALUE."
    if (flag := str(error).removesuffix(" does not take an argument")) != str(error):
        return f"{flag}: --no… takes no value. Write {flag.partition('=')[0]}."
    if error.__context__ is None:  # a flag's validator failed, not the parsing of a value
        return _missing_flag(module) or str(error).partition(": ")[2]
    return _wrong_field() or _wrong_flag(error) or str(error)


def unknown_field(argument: str) -> str | None:
    """What is wrong with the field that an override names; None when nothing is, or `argument` is no override."""
    match = OVERRIDE.match(argument)
    if match is None:
        return None
    path = match[1]
    try:
        check_field(path)
    except ConfigError as error:
        return str(error)
    section = operator.attrgetter(path)(Config())
    if dataclasses.is_dataclass(section):
        names = ", ".join(field.name for field in dataclasses.fields(section))
        meant = " or ".join(f"config.{each}" for each in fields_meant(path, field_paths()))
        remedy = f"Did you mean {meant}?" if meant else f"Set one of its fields: {names}."
        return f"config.{path} is a section and has no value of its own. {remedy}"
    return None


def surplus(module: str) -> list[Stray]:
    """The arguments that are no flags, without those that the program takes."""
    allowed = bool(getattr(sys.modules[module], "ARGUMENT", "")) + getattr(sys.modules[module], "MORE_ARGUMENTS", 0)
    return [*strays(file_first(sys.argv)[1:])][allowed:]


def explain_stray(stray: Stray, module: str, missing: Sequence[str]) -> str:
    """The message for an argument that should have been a flag; `missing` are required flags without a value."""
    before = " A program and its flags come after --." if hasattr(sys.modules[module], "TAKES_PROGRAM") else ""
    stands_for = getattr(sys.modules[module], "STRAY_ARGUMENT", "")
    takes = hasattr(sys.modules[module], "ARGUMENT")
    text = stray_argument(stray, own_flags(module), missing, stands_for=stands_for, takes_arguments=takes)
    return f"{text}{before}"


def _wrong_flag(error: Exception) -> str | None:
    """What is wrong with the value of a flag, which absl's message begins with."""
    name, sign, _ = str(error).removeprefix("flag --").partition("=")
    if not sign or name not in flags.FLAGS:
        return None
    value = str(error).removeprefix(f"flag --{name}=").removesuffix(f": {error.__context__}")
    return wrong_value(flags.FLAGS[name], value)


def _wrong_field() -> str | None:
    """What is wrong with the value of the first override whose value is not of its field's type."""
    _, *arguments = file_first(sys.argv)
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        match = OVERRIDE.match(argument)
        if match is None or not is_field(match[1]):
            continue
        kind = type(operator.attrgetter(match[1])(Config()))
        if kind is bool and "=" not in argument:  # --config.… or --noconfig.…, which take no value
            continue
        value = argument.partition("=")[2] if "=" in argument else following
        try:
            override(Config(), f"{match[1]}={value}")
        except ConfigError:
            return wrong_field_value(match[1], value, kind, type_name(kind))
    return None


def _missing_flag(module: str) -> str | None:
    missing = [name for name in flags.FLAGS if is_required(flags.FLAGS[name]) and flags.FLAGS[name].value is None]
    if missing and (found := surplus(module)):
        return explain_stray(found[0], module, missing)
    return f"--{missing[0]} is required: {flags.FLAGS[missing[0]].help}." if missing else None
