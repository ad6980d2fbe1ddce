"""What a reader is that is fed with damaged and hostile files."""

import dataclasses
from collections.abc import Callable
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Reader:
    """One kind of file and the code that reads it.

    Attributes:
      name: what the file is.
      seeds: returns whole files, from which damaged ones are made.
      read: takes an empty folder and the bytes of a file. It puts the file there, reads it as fiddlex does, and
        compares the value with what the bytes say. Raises FiddlexError where fiddlex refuses the file, and
        AssertionError where fiddlex returns a wrong value.
      is_json: whether a file is JSON, or a line of JSON for each record, so that whole values are replaced too.
      may_be_cut: whether a file that is cut short may still be read, because nothing in it tells its length.
    """

    name: str
    seeds: Callable[[], list[bytes]]
    read: Callable[[Path, bytes], None]
    is_json: bool = False
    may_be_cut: bool = False
