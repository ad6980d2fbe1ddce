"""Files that are replaced as a whole: after a kill at any moment, a path has its old content or its new, never a part.

New content goes into another file beside the path, which takes the path's place once it is complete. So a process that
is killed before that leaves a file whose name ends in `.tmp`, and which nothing reads.
"""

import contextlib
import errno
import glob
import itertools
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_LEFTOVER_S = 3600.0  # age of an incomplete file that nobody writes to any more


@contextlib.contextmanager
def replacing(path: str | Path, *, shared: bool = False, synced: bool = False) -> Iterator[BinaryIO]:
    """Yields a file to write, which takes the place of `path` when the body ends without an error.

    Until then it is NAME.tmp beside `path`. An error removes it; what a kill left, the next call replaces. An OSError
    has `path` in its message, and `path` is then as it was. With `shared`, other processes may write the same file at
    the same time: each writes to a name of its own, NAME-*.tmp, and `remove_leftovers` removes what kills left. With
    `synced`, the content is on disk before it takes the place of `path`, so that a failure of the machine leaves no
    part either.
    """
    path = Path(path)
    if path.exists() and not path.is_file() and not stat.S_ISFIFO(path.lstat().st_mode):  # such as /dev/stdout
        raise OSError(errno.EINVAL, "It is a folder or a device, and must be a file", str(path))
    part = path.with_name(f"{path.name}-{secrets.token_hex(4)}.tmp" if shared else f"{path.name}.tmp")
    if not shared:
        part.unlink(missing_ok=True)
    file = part.open("xb")  # never through a link that somebody has put there
    try:
        with file:
            yield file
            if synced:
                file.flush()
                os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException as error:
        if isinstance(error, OSError) and error.errno and error.filename is None:  # as of a write to a full disk
            error.filename = str(path)
        with contextlib.suppress(OSError):  # such as of a disk that has become read-only; the first error says why
            part.unlink()
        raise


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Replaces a small file, which one process at a time writes, and waits until it is on disk."""
    with replacing(path, synced=True) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_output(path: Path, content: str | bytes) -> None:
    """As `write_whole`, but writes to a device and through a link as they are: /dev/stdout, a link, stays one."""
    try:
        if path.is_symlink() or (path.exists() and not path.is_file()):
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        else:
            write_whole(path, content)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def name_folder(part: Path, path: Path) -> None:
    """Gives a complete folder its name, once all its files are on disk.

    Raises OSError when anything but an empty folder is at `path`, or a file system refuses; `part` then stays.
    """
    for file in part.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
    os.rename(part, path)


def remove_leftovers(path: Path) -> None:
    """Removes what processes that were killed an hour ago or earlier left of a file that several processes write."""
    for part in path.parent.glob(f"{glob.escape(path.name)}-*.tmp"):
        with contextlib.suppress(FileNotFoundError):  # another process has removed it
            if time.time() - part.stat().st_mtime > _LEFTOVER_S:
                part.unlink()


def unused(folder: Path, name: str) -> Path:
    """A path in `folder` where nothing is yet: `name`, with the date and time in place of {}, and -2, … if need be."""
    now = time.strftime("%Y%m%d-%H%M%S")
    stamps = itertools.chain([now], (f"{now}-{number}" for number in itertools.count(2)))
    return next(path for stamp in stamps if not os.path.lexists(path := folder / name.format(stamp)))


def check_replaceable(path: Path) -> None:
    """Raises OSError when `path` cannot be replaced: work that takes long asks this before it begins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    with tempfile.TemporaryFile(dir=path.parent):
        pass
