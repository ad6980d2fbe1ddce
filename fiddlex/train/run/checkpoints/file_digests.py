"""The list of a checkpoint's files with their SHA-256 digests, which is part of the checkpoint.

The checksums in `meta` are those of the arrays as they were on the devices. They do not cover the bytes that orbax
needs to find an array and to decode it, nor the sign of a zero. The list covers each byte of the files, so that a fault
is found before anything is decoded, and named by its file. It is the file `SHA256SUMS` in the format of coreutils:
`sha256sum --check SHA256SUMS` in the checkpoint's folder verifies it without fiddlex. Its first line, a comment, is the
digest of the lines below it.

When the writer has written all files and before orbax gives the checkpoint its name, they are read back, in the
background. Of several processes each reads the files that it wrote; the first process reads those of all processes and
writes the list. A finished checkpoint therefore has a list, unless an earlier version of fiddlex made it. The list
leaves out what orbax writes afterwards and fiddlex does not read: `_CHECKPOINT_METADATA`, which has the time of the
end, and files named `commit_success.txt`.

A checkpoint is written as folders and regular files. A link, a pipe or a device in it is damage, and is never opened:
it could lead to any file, or never end. The checkpoint's own folder may be a link, as when it is moved to another disk.
"""

import contextlib
import hashlib
import os
import stat
from collections.abc import Callable, Collection
from pathlib import Path

from fiddlex.files.whole_files import write_whole

LIST = "SHA256SUMS"
_PART = ".sha256sums_"  # + rank: the digests of the files that another process wrote, until the first has read them
_UNFINISHED = ".orbax-checkpoint-tmp"  # in the name of a folder, while orbax writes a checkpoint or an item of it
_AFTERWARDS = ("commit_success.txt", "_CHECKPOINT_METADATA")


def is_unfinished(path: Path) -> bool:
    return _UNFINISHED in path.name


def record_own(directory: Path, step: int, rank: int) -> None:
    """Records, once, digests of the files that this process, which is not the first, has written of a checkpoint."""
    with contextlib.suppress(FileNotFoundError):
        path = _unfinished(directory, step)
        part = path / f"{_PART}{rank}"
        if not part.exists():
            own = [name for name in _files(path) if name.split("/")[1:2] == [f"ocdbt.process_{rank}"]]
            _write(part, _digests(path, own))


def record_all(directory: Path, step: int) -> None:
    """Writes the list of a checkpoint that all processes have written, and that does not have its name yet."""
    path = _unfinished(directory, step)
    known: dict[str, str] = {}
    for part in path.glob(f"{_PART}*"):
        known |= {name.replace(_UNFINISHED, ""): digest for name, digest in _read(part).items()}  # named since
        part.unlink()
    files = _files(path)
    others = _digests(path, [name for name in files if name not in known])
    _write(path / LIST, {name: known.get(name) or others[name] for name in files})


def read_list(path: Path) -> dict[str, str]:
    """The digest of each file by its path in the checkpoint; empty without a list, ValueError for a damaged one."""
    with contextlib.suppress(FileNotFoundError):
        return _read(path / LIST)
    return {}


def foreign_files(path: Path) -> dict[str, str]:
    """What a checkpoint has besides folders and regular files, by its path in the checkpoint, and what it is."""
    found = {}
    for folder, folders, files in os.walk(path):  # follows no links in it
        for place in (Path(folder, name) for name in (*folders, *files)):
            with contextlib.suppress(FileNotFoundError):  # a run that deletes the checkpoint now
                mode = place.lstat().st_mode
                if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                    kind = f"a link to {os.readlink(place)}" if stat.S_ISLNK(mode) else "a pipe or a device"
                    name = place.relative_to(path).as_posix()
                    found[name] = f"it is {kind}, and a checkpoint has only folders and files"
    return found


def damaged_files(
    path: Path,
    *,
    items: Collection[str] = (),
    share: tuple[int, int] = (0, 1),
    told: Callable[[str, int], None] = lambda name, size: None,
) -> dict[str, str]:
    """What is wrong with which files of a checkpoint; without a list, only links, pipes and devices are found.

    `items` are the folders whose digests to compare, besides those of files outside of folders; empty: all. `share` is
    (i, n) to compare only the digests of the i-th of n equal parts of the files. `told` is called after each file with
    its name and its size in bytes.
    """
    foreign = foreign_files(path)
    try:
        recorded = {} if LIST in foreign else read_list(path)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        unknown = "Of the other files it is not known whether they are what was written"
        return foreign | {LIST: f"the list of digests is itself damaged: {reason}. {unknown}"}
    wanted = [name for name in sorted(recorded) if not items or "/" not in name or name.partition("/")[0] in items]
    wanted = [name for name in wanted if foreign.keys().isdisjoint((name, *map(str, Path(name).parents)))]
    found = dict(foreign)
    index, number = share
    for name in wanted[index::number]:
        try:
            if _digest(path / name) != recorded[name]:
                found[name] = "it is not what was written: its SHA-256 digest is another"
        except FileNotFoundError:
            found[name] = "it is missing"
        except OSError as error:
            found[name] = f"it cannot be read: {error.strerror or error}"
        else:
            told(name, (path / name).stat().st_size)
    return found


def _unfinished(directory: Path, step: int) -> Path:
    """The folder in which orbax is writing the checkpoint of a step; raises FileNotFoundError when it is not there."""
    found = max(directory.glob(f"{step}{_UNFINISHED}*"), key=lambda path: path.stat().st_mtime, default=None)
    if found is None:
        raise FileNotFoundError(f"{directory} has no folder {step}{_UNFINISHED}")
    return found


def _files(path: Path) -> list[str]:
    """The files of a checkpoint that are there when the list is written, by their paths in it."""
    files = (file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
    return sorted(name for name in files if not name.endswith(_AFTERWARDS) and not name.startswith((LIST, _PART)))


def _digests(path: Path, names: list[str]) -> dict[str, str]:
    return {name: _digest(path / name) for name in names}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, digests: dict[str, str]) -> None:
    text = "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
    write_whole(path, f"# {hashlib.sha256(text.encode()).hexdigest()}  the lines below\n{text}")


def _read(path: Path) -> dict[str, str]:
    first, _, text = path.read_bytes().partition(b"\n")
    if first != f"# {hashlib.sha256(text).hexdigest()}  the lines below".encode():
        raise ValueError("its lines have another SHA-256 digest than its first line says")
    digests = {name: digest for digest, name in (line.split("  ", 1) for line in text.decode().splitlines())}
    for name in digests:
        if not Path(os.path.normpath(path.parent / name)).is_relative_to(os.path.normpath(path.parent)):
            raise ValueError(f"it names {name}, which is outside of the checkpoint")
    return digests
