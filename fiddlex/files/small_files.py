"""Reads small files that may come from somebody else: configs, indexes, records of a run.

Invariant: nothing that such a file says decides how much memory the reader takes. A file larger than `MOST_BYTES` is
refused before it is read, and a pipe or a device, which may never end, before it is opened (`check_regular`; larger
files of a workdir or a cache are checked by it too).
"""

import json
import os
import stat
from pathlib import Path
from typing import Any

MOST_NAME = 255  # characters of a file's name; the limit of file systems
MOST_BYTES = 2**26  # of a file; the index of a model with 10¹² weights has 1.5·10⁷


def check_regular(path: str | Path) -> os.stat_result:
    """The status of a file that is about to be opened; ValueError if it is not regular, OSError if there is none."""
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("it is a folder, a pipe or a device, and must be a file")
    return found


def read_small(path: str | Path) -> str:
    """The text of a file, without a byte order mark, which spreadsheets and some editors put first.

    Raises:
      OSError: when it cannot be read (FileNotFoundError: there is none).
      ValueError: when it is no regular file, has more than `MOST_BYTES`, or is not UTF-8.
    """
    found = check_regular(path)
    if found.st_size > MOST_BYTES:
        raise ValueError(f"it has {found.st_size:,} bytes, and may have {MOST_BYTES:,}")
    with open(path, "rb") as file:
        return file.read(found.st_size).decode("utf-8-sig")


def json_object(text: str | bytes) -> dict[str, Any]:
    """The JSON object in a text.

    Raises:
      ValueError: when it is none, gives a key twice, is nested too deeply, or has a number of thousands of digits.
    """
    try:
        value = json.loads(text, object_pairs_hook=unique)
    except RecursionError as error:
        raise ValueError("its JSON is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, of which Python's json would keep the last of several values of a key."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it gives the key {next(name for name in names if names.count(name) > 1)!r} twice")
    return made


def read_object(path: str | Path) -> dict[str, Any]:
    """The JSON object in a file; raises as `read_small` and `json_object` do."""
    return json_object(read_small(path))


def is_own_name(name: Any) -> bool:
    """Whether a name that a file gives can be that of a file or folder beside it, and leads nowhere else."""
    return isinstance(name, str) and Path(name).name == name and name not in ("", "..") and len(name) <= MOST_NAME
