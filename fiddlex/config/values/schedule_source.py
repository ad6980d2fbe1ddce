"""The three ways to say which schedule runs, in `pipeline.schedule` and in flags such as `--name`.

    1f1b                 a name, of those that `fiddlex schedule --help` lists, or `auto`
    file:PATH.csv        a table in a file
    PATH.py:FUNCTION     a function in a Python file of the user's, which makes a schedule of any sizes

`pipeline.semantics`, `optimizer.name` and `optimizer.schedule` take the third form too. Invariant: to read such a text
runs nothing and opens no file. `fiddlex.schedules.generators.make_schedule` makes the schedule.
"""

import enum
import functools
import os
from typing import NamedTuple

FORMS = ("file:PATH.csv", "PATH.py:FUNCTION")
_TABLE, _PYTHON = "file", ".py"


class Kind(enum.Enum):
    """What a text names."""

    NAME = enum.auto()
    TABLE = enum.auto()
    FUNCTION = enum.auto()


class Source(NamedTuple):
    """Where a schedule comes from."""

    kind: Kind
    path: str = ""  # the file of a table or of a function, with the user's home in place of `~`; empty for a name
    function: str = ""  # empty where the text gives none, and for other kinds

    @property
    def is_own(self) -> bool:
        """Whether the schedule is in a file of the user's, as a table or as a function."""
        return self.kind is not Kind.NAME

    @property
    def is_missing(self) -> bool:
        """Whether the schedule is in a file that does not exist."""
        return self.is_own and not os.path.exists(self.path)


@functools.cache  # the planner asks for each layout
def source_of(text: str) -> Source:
    before, colon, after = text.partition(":")
    if before == _TABLE and colon:
        return Source(Kind.TABLE, os.path.expanduser(after))
    path, colon, function = text.rpartition(":")
    if text.endswith(_PYTHON):
        return Source(Kind.FUNCTION, os.path.expanduser(text))
    if colon and path.endswith(_PYTHON):
        return Source(Kind.FUNCTION, os.path.expanduser(path), function)
    return Source(Kind.NAME)


def is_function(text: str) -> bool:
    return source_of(text).kind is Kind.FUNCTION


def hint(text: str) -> str:
    """What was meant, where a text that names no schedule looks like a file or a function; empty where it does not."""
    path, _, function = text.rpartition(":")
    if function.isidentifier() and path:
        return f"A function of your own is named by its file, as in {path}{_PYTHON}:{function}."
    if os.path.isfile(text) or text.endswith(".csv"):
        return f"A table in a file is named file:{text}."
    return ""
