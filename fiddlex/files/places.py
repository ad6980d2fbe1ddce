"""Where the paths that a user writes lead, the folder of the user's caches, and which folders are checkpoints."""

import os
from pathlib import Path


def absolute(path: str | Path) -> Path:
    """The path from the root, with `~` as the user's home; an unknown user's `~name` stays as it is written."""
    return Path(os.path.abspath(os.path.expanduser(path)))


def cache_folder() -> Path:
    """The folder in which fiddlex keeps what it can make again.

    Raises:
      FileNotFoundError: when the user has no home, as in a container whose user has no entry, and names no folder.
    """
    folder = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    if folder.startswith("~"):
        raise FileNotFoundError("this user has no home directory: set XDG_CACHE_HOME")
    return Path(folder) / "fiddlex"


def steps_in(directory: Path) -> list[int]:
    """Steps that have a finished checkpoint in a directory, in ascending order."""
    if not directory.is_dir():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if path.is_dir() and is_step(path.name))


def is_step(name: str) -> bool:
    """Whether a folder of this name is a finished checkpoint: 40, but neither 0040 nor -1."""
    return name.isdecimal() and name == str(int(name))
