"""Folders that appear whole or not at all."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from fiddlex.errors import CheckpointError
from fiddlex.files.whole_files import name_folder
from fiddlex.train.run.workdir import writing

LOCK, PART = "lock", "part"


def require_absent(target: Path) -> None:
    """Raises CheckpointError when anything but an empty directory is at `target`, which --target names."""
    with writing(target, named_by="--target"):
        # A new directory cannot take the place of a link or a mount.
        whole = not target.is_symlink() and target.is_dir() and not os.path.ismount(target)
        if os.path.lexists(target) and not (whole and next(target.iterdir(), None) is None):
            raise CheckpointError(
                f"--target={target} is there already, and is no empty directory that a new one can replace. Name "
                "another directory, or move it away."
            )


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yields an empty folder that becomes `target` when the body ends without an error.

    Until then it is in `.NAME.fiddlex-part` beside the target. The next call for the same target removes what a killed
    process left there.
    """
    target = Path(os.path.abspath(target))
    require_absent(target)
    beside = target.with_name(f".{target.name}.fiddlex-part")
    if os.path.lexists(beside) and not (beside / LOCK).is_file():
        raise CheckpointError(f"{beside} is in the way, and fiddlex has not made it. Move it away.")
    with writing(target, named_by="--target"):
        beside.mkdir(parents=True, exist_ok=True)
        lock = FileLock(beside / LOCK)
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise CheckpointError(f"Another process is making {target}. Wait until it ends, or stop it.") from error
    try:
        with writing(target, named_by="--target"):
            shutil.rmtree(beside / PART, ignore_errors=True)
            (beside / PART).mkdir()
            yield beside / PART
            require_absent(target)
            name_folder(beside / PART, target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)  # the lock file goes too, while this process holds the lock
        lock.release()
