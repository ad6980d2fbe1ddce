"""Values of a line's cells or keys, checked; a line that holds others is bad."""

import itertools
import reprlib
import string
from collections.abc import Iterable, Mapping
from typing import Any

from fiddlex.config import rules

MISSING_KEY = "missing key"  # reason of a line
_LISTED_NAMES = 20

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 60
_repr.maxlevel = 2


class BadLineError(ValueError):
    """What is wrong with a line.

    Args:
      reason: a few words for the count of lines that were passed over.
      message: sentences with the value and the rule, and the remedy if mending the line is not the only one.
    """

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


def text_of(values: Mapping[str, Any], name: str, *, named_by: str = "", may_be_empty: bool = False) -> str:
    """The text of a cell or key.

    Args:
      values: of a line.
      name: of the column or key.
      named_by: the config field that names it, if one does.
      may_be_empty: else a text has a character that is not white space.

    Raises:
      BadLineError: when it is missing, no text, empty, or not made of characters.
    """
    return checked_text(value_of(values, name, named_by=named_by), name, may_be_empty=may_be_empty)


def value_of(values: Mapping[str, Any], name: str, *, named_by: str = "") -> Any:
    """The value of a cell or key.

    Raises:
      BadLineError: when it is missing.
    """
    if name not in values:
        which = f", which {named_by} names" if named_by else ""
        raise BadLineError(MISSING_KEY, f"there is no key {name!r}{which}. {nearest(name, values)}")
    return values[name]


def checked_text(value: Any, name: str, *, may_be_empty: bool = False) -> str:
    """`value` if it is a text as `text_of` wants it, for `name`."""
    if not isinstance(value, str):
        raise BadLineError("wrong type", f"{name!r} is {shown(value)}, and must be a string.")
    if not (may_be_empty or value.strip()):
        raise BadLineError("empty text", f"{name!r} is {shown(value)}, and must not be empty.")
    if "\0" in value:
        raise BadLineError("NUL character", f"{name!r} has a NUL character at position {value.index(chr(0))}.")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        half = value[error.start]
        raise BadLineError(
            "half a character",
            f"{name!r} has {half!r} at position {error.start}, one half of a surrogate pair, which is no character.",
        ) from error
    return value


def shown(value: Any) -> str:
    """`value` as Python writes it, with its middle left out when it is long."""
    return _repr.repr(value)


def choice_index(value: Any, num_choices: int, *, name: str) -> int:
    """The choice that a label means: an index from 0, as a number or as text, or a letter from A.

    Args:
      value: of the label's column or key.
      num_choices: from which it chooses.
      name: of the column or key.

    Raises:
      BadLineError: when it is none of them.
    """
    last = string.ascii_uppercase[min(num_choices, 26) - 1]
    if isinstance(value, str) or type(value) is int:  # not bool
        text = str(value).strip()
        if len(text) == 1 and "A" <= text <= last:
            return ord(text) - ord("A")
        if text.isdecimal() and len(text) < 10 and int(text) < num_choices:
            return int(text)
    raise BadLineError(
        "label that is no choice",
        f"{name!r} is {shown(value)}, and must be the right choice's index from 0 to {num_choices - 1} or its letter "
        f"from A to {last}.",
    )


def checked_choices(value: Any, name: str) -> tuple[str, ...]:
    """The choices in a key that holds a list of texts.

    Raises:
      BadLineError: when it is no list, or one of them is no text or empty.
    """
    if not isinstance(value, list):
        raise BadLineError("wrong type", f"{name!r} is {shown(value)}, and must be a list of strings.")
    return tuple(checked_text(choice, f"{name}[{i}]") for i, choice in enumerate(value))


def nearest(name: str, names: Iterable[str]) -> str:
    """The closest of `names`, or the first of them, as a sentence."""
    known = [known[:60] for known in itertools.islice(names, _LISTED_NAMES)]
    return rules.nearest(name, known) if known else "The object is empty."
