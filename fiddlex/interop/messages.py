"""Values and names from files, short enough for a message whatever a file says."""

import reprlib
from typing import Any

MOST_NAME = 160  # characters; the longest names of the classes that fiddlex has are below 70

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 60
_repr.maxlevel = 2


def shown(value: Any) -> str:
    """The Python representation of `value`, without its middle when it is long."""
    return _repr.repr(value)


def shortened(name: str) -> str:
    """A name as it is, without its middle when it has more than `MOST_NAME` characters."""
    half = MOST_NAME // 2
    return name if len(name) <= MOST_NAME else f"{name[:half]}...{name[-half:]}"
