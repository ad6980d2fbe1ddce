"""What a person meant by a flag that does not exist, an argument that is no flag, or a value that a flag cannot take.

Each function returns a message with what would be right, for a program whose flags absl has already registered.
"""

import difflib
import itertools
import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from absl import flags

from fiddlex.config import rules
from fiddlex.config.config import check_field, field_paths
from fiddlex.config.files import config_names
from fiddlex.config.other_names import FLAGS, answer, fields_meant
from fiddlex.errors import ConfigError
from fiddlex.terminal.help import takes_file

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_BOOLS = dict.fromkeys(_TRUE, "true") | dict.fromkeys(_FALSE, "false")
_NUMBER = re.compile(r"([-+]?[\d.,_ ]*\d[.]?(?:e[-+]?\d+)?) ?([kmb%]?)", re.IGNORECASE)
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "%": 0.01}


class Stray(NamedTuple):
    """An argument that is neither a flag nor a flag's value."""

    text: str
    before: str  # the argument before it; empty where it is the first


def unknown_flag(name: str, argument: str, own: Sequence[str], *, positional: str = "") -> str:
    """The message for a flag that does not exist; `argument` is the whole argument, as in `--lr=3`.

    `own` has the names of the program's flags. `positional` says what its first positional argument is; empty: it takes
    none.
    """
    sign, value = argument.partition("=")[1:]
    has_config = "config" in own
    if FLAGS.get(name) in own:
        return f"there is no flag --{name}. Did you mean --{FLAGS[name]}{sign}{value}?"
    if name.startswith("noconfig.") and name.removeprefix("noconfig.") in field_paths():
        return f"there is no flag --{name}. Only a bool takes --no…: write --{name.removeprefix('no')}=VALUE."
    if has_config and (paths := fields_meant(name, field_paths())):
        written = " or ".join(f"--config.{path}{sign}{value}" if sign else f"--config.{path}=VALUE" for path in paths)
        return f"there is no flag --{name}, but a field of the config: write {written}."
    if name == "version" or (has_config and answer(name)):
        return f"there is no flag --{name}. {answer(name)}"
    if has_config and "." in name:
        try:
            check_field(name.removeprefix("no"))
        except ConfigError as error:
            return f"there is no flag --{name}. {error}"
    if close := difflib.get_close_matches(name.replace("-", "_"), own, n=1):
        return f"there is no flag --{name}. Did you mean --{close[0]}{sign}{value}?"
    if has_config and (path := _similar_field(name)):
        return f"there is no flag --{name}. Did you mean --config.{path}{sign}{value}?"
    known = f"Known: {', '.join(f'--{each}' for each in own)}." if own else "This program has none."
    first = f" Arguments come without a flag, first {positional}." if positional else ""
    return f"there is no flag --{name}. {known}{first}"


def strays(arguments: Sequence[str]) -> Iterator[Stray]:
    """The arguments that are neither flags nor values of flags; `arguments` end before any `--`."""
    is_value = False
    for before, argument in itertools.pairwise(["", *arguments]):
        if is_value or (argument.startswith("-") and argument != "-"):
            name = argument.lstrip("-")
            takes_value = name in flags.FLAGS and not flags.FLAGS[name].boolean
            is_value = not is_value and takes_value and "=" not in argument
        else:
            yield Stray(argument, before)


def stray_argument(
    stray: Stray, own: Sequence[str], missing: Iterable[str], *, stands_for: str = "", takes_arguments: bool = False
) -> str:
    """The message for an argument that should have been one of the program's `own` flags.

    `missing` are flags that are required and have no value. `stands_for` is the flag whose value the argument most
    likely is; empty where the program has none of the kind. With `takes_arguments` it takes other arguments that are no
    flags.
    """
    text, flag = stray.text, stray.before.lstrip("-")
    known = flags.FLAGS[flag] if stray.before.startswith("-") and flag in flags.FLAGS else None
    name, sign, value = text.lstrip("-").partition("=")
    if known is not None and known.boolean and text.lower() in _BOOLS:
        return f"{text!r} is not a flag. A bool takes its value after =: write {stray.before}={_BOOLS[text.lower()]}."
    if _is_list(stray.before):
        return f"{text!r} is not a flag. A list has commas and no spaces: write {stray.before.rstrip(',')},{text}."
    path = name.removeprefix("config.")
    if sign and name in own:
        return f"{text!r} is not a flag. Write --{text}."
    if sign and stands_for:
        return f"{text!r} is not a flag. Write --{stands_for}={text}."
    if sign and "config" in own and (paths := fields_meant(path, field_paths())):
        return f"{text!r} is not a flag. Write {' or '.join(f'--config.{each}={value}' for each in paths)}."
    wanted = [name for name in missing if name in own]
    if "config" in own and takes_file(flags.FLAGS["config"]) and (wanted[:1] == ["config"] or _is_config(text)):
        wanted = ["config"]
    if wanted or stands_for:
        return f"{text!r} is not a flag. Write --{[*wanted, stands_for][0]}={shlex.quote(text)}."
    if takes_arguments:
        return f"{text!r} is one argument too many. A flag is written --name=value."
    if len(own) == 1:
        return f"{text!r} is not a flag. This program takes only --{next(iter(own))}: leave it out."
    return f"{text!r} is not a flag. Write --name=value, and --name or --noname for a bool."


def wrong_value(flag: flags.Flag, value: str) -> str | None:
    """The message for a value that a flag cannot take; None where absl's own says enough."""
    parser = flag.parser
    if isinstance(parser, flags.EnumParser):
        text = f"--{flag.name}={value} is not one of {', '.join(parser.enum_values)}. "
        return (text + rules.close(value, parser.enum_values)).rstrip()
    if flag.boolean:
        return f"--{flag.name}={value} must be true or false{_for_bool(value)}."
    if not isinstance(parser, flags.IntegerParser | flags.FloatParser):
        return None
    kind = int if isinstance(parser, flags.IntegerParser) else float
    try:
        kind(value)
    except ValueError:
        if isinstance(flag, flags.MultiFlag) and all(part.strip().isdecimal() for part in value.split(",")):
            several = " ".join(f"--{flag.name}={part.strip()}" for part in value.split(","))
            return f"--{flag.name}={value} must be one number; several are {several}."
        return f"--{flag.name}={value} must be {_KINDS[kind]}{number_meant(value, kind)}."
    least, most = parser.lower_bound, parser.upper_bound
    bounds = [f"{word} {bound:g}" for word, bound in (("at least", least), ("at most", most)) if bound is not None]
    return f"--{flag.name}={value} must be {' and '.join(bounds)}."


_KINDS: Mapping[type, str] = {int: "a whole number", float: "a number"}


def wrong_field_value(path: str, value: str, kind: type, type_name: str) -> str:
    """The message for a value that is not of the type of the config's field `path`."""
    if value == "=":
        remedy = ": leave no space around ="
    elif not value:
        remedy = ": it has no value"
    elif kind is bool:
        remedy = _for_bool(value) or ": use true or false"
    else:
        number = int if issubclass(kind, int) else kind
        remedy = number_meant(value, number) or f", {_KINDS[number]}"
    return f"config.{path}={value!r} must be of type {type_name}{remedy}."


def number_meant(text: str, kind: type) -> str:
    """How to write 1k, 1e3, 1,000, 4.0 or 5% as an int or a float, as in `: write 1000`; empty: not known."""
    match = _NUMBER.fullmatch(text.strip())
    if kind not in (int, float) or match is None:
        return ""
    digits = match[1].replace(" ", "").replace("_", "")
    digits = digits.replace(",", "" if re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+", digits) else ".")
    try:
        number = float(digits) * _UNITS[match[2].lower()]
    except ValueError:
        return ""
    if not math.isfinite(number) or (kind is int and not number.is_integer()):
        return ""
    return f": write {f'{int(number)}' if kind is int else f'{number:.12g}'}"


def _for_bool(value: str) -> str:
    return f": write {_BOOLS[value.lower()]}" if value.lower() in _BOOLS else ""


def _is_list(argument: str) -> bool:
    """Whether an argument is a flag with a list as its value, as in `--sizes=2`."""
    name, sign, _ = argument.lstrip("-").partition("=")
    return bool(sign) and name in flags.FLAGS and isinstance(flags.FLAGS[name].parser, flags.ListParser)


def _is_config(text: str) -> bool:
    named = text.partition(":")[0]
    return named.endswith(".py") or named in config_names()


def _similar_field(name: str) -> str:
    """The field whose own name is nearest to `name`; empty where none is near."""
    paths = {path.rpartition(".")[2]: path for path in field_paths()}
    close = difflib.get_close_matches(name.replace("-", "_"), paths, n=1, cutoff=0.75)
    return paths[close[0]] if close else ""
