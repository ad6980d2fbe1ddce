"""Where the paths that a user writes lead, and the folder of the user's caches."""

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
