"""Checks of the values in a line's cells or keys; a line with invalid values is bad."""

import itertools
import string
from collections.abc import Iterable, Mapping
from typing import Any

from fiddlex.config import rules
from fiddlex.terminal.readable import shown

MISSING_KEY = "missing key"  # the reason why a line is bad
_LISTED_NAMES = 20


class BadLineError(ValueError):
    """A line that is bad, and why.

    `reason` is a few words under which skipped lines are counted; `message` has sentences with the value and the rule,
    and the remedy if correcting the line is not the only one.
    """

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


def text_of(values: Mapping[str, Any], name: str, *, named_by: str = "", may_be_empty: bool = False) -> str:
    """The text of a cell or key; raises BadLineError when it is missing, not a string, empty or of invalid characters.

    `named_by` is the config field that names it, if one does, for the message.
    """
    return checked_text(value_of(values, name, named_by=named_by), name, may_be_empty=may_be_empty)


def value_of(values: Mapping[str, Any], name: str, *, named_by: str = "") -> Any:
    """The value of a cell or key; raises BadLineError when there is none."""
    if name not in values:
        which = f", which {named_by} names" if named_by else ""
        raise BadLineError(MISSING_KEY, f"there is no key {name!r}{which}. {nearest(name, values)}")
    return values[name]


def checked_text(value: Any, name: str, *, may_be_empty: bool = False) -> str:
    """Returns `value` if it is a valid text; raises BadLineError, as `text_of` does for `name`, if it is not."""
    value = checked_string(value, name)
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


def checked_string(value: Any, name: str) -> str:
    """Returns `value`; raises BadLineError when it is not a string."""
    if not isinstance(value, str):
        raise BadLineError("wrong type", f"{name!r} is {shown(value)}, and must be a string.")
    return value


def choice_index(value: Any, num_choices: int, *, name: str) -> int:
    """The choice that a label names: an index from 0, as a number or as text, or a letter from A; else BadLineError."""
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
    """The choices in a key that holds a list of texts; raises BadLineError for another value or an empty text."""
    if not isinstance(value, list):
        raise BadLineError("wrong type", f"{name!r} is {shown(value)}, and must be a list of strings.")
    return tuple(checked_text(choice, f"{name}[{i}]") for i, choice in enumerate(value))


def nearest(name: str, names: Iterable[str]) -> str:
    """A sentence that suggests the closest of `names`, or lists the first of them."""
    known = [known[:60] for known in itertools.islice(names, _LISTED_NAMES)]
    return rules.nearest(name, known) if known else "The object is empty."
