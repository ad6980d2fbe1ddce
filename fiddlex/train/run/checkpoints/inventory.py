"""Which checkpoints a workdir has, what each of them holds, and whether it is what was saved.

Reads neither the run's config nor orbax's own description, and starts no accelerator. Memory is bounded by the largest
array of a checkpoint, which is read whole.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fiddlex.errors import CheckpointError
from fiddlex.files.places import is_step
from fiddlex.schedules.placement import PADDING
from fiddlex.train.run.checkpoints.checksums import other_checksum
from fiddlex.train.run.checkpoints.file_digests import LIST, damaged_files, is_unfinished, read_list
from fiddlex.train.run.checkpoints.meta import Meta, read_meta
from fiddlex.train.run.checkpoints.reading import first_line
from fiddlex.train.run.checkpoints.stored_arrays import StoredArrays

FOLDERS = ("checkpoints", "best", "damaged_checkpoints")  # of a workdir, in the order in which they are told
USABLE = FOLDERS[:2]  # from which fiddlex reads
RESUMABLE = FOLDERS[0]  # from whose checkpoints a run goes on
Progress = Callable[[str, int], None]  # is called with what was read and its bytes


@dataclasses.dataclass(frozen=True)
class Entry:
    """A checkpoint of a workdir. Whether its files are whole, only `verify` tells."""

    path: Path
    # "finished", "unfinished" (a process was ended while it wrote it, or writes it now), "set aside" (`Checkpoints`) or
    # "renamed" (its name is no step, so that nothing reads it)
    state: str
    num_bytes: int  # of all its files
    written: float  # when, in seconds since 1970: the time of its newest file
    step: int | None = None  # that it says it is of; None when it cannot be read
    # "weights", "optimizer", "last_update", and a name for each older version of the weights
    parts: tuple[str, ...] = ()
    num_parameters: int | None = None  # number of weights; with the vocabulary's padding, without that of layers
    dtypes: dict[str, list[str]] = dataclasses.field(default_factory=dict)  # of the arrays of each part
    reason: str = ""  # why it cannot be read; empty when it can, or is unfinished

    def facts(self) -> dict[str, Any]:
        """The entry as a JSON object."""
        return dataclasses.asdict(self) | {"path": str(self.path)}


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether a checkpoint is what was saved."""

    path: Path
    num_arrays: int  # that were read
    num_bytes: int  # of these arrays, decoded
    num_files: int  # whose digests were compared; 0 when the checkpoint has no list of them
    damaged_files: dict[str, str]  # what is wrong with which file
    damaged_arrays: dict[str, str]  # which array has another checksum; `meta`: what the checkpoint says of itself
    unreadable_arrays: dict[str, str]  # why which array cannot be read
    seconds: float  # that the verification took

    @property
    def whole(self) -> bool:
        return not (self.damaged_files or self.damaged_arrays or self.unreadable_arrays)

    def facts(self) -> dict[str, Any]:
        """The verdict as a JSON object."""
        return dataclasses.asdict(self) | {"path": str(self.path), "whole": self.whole}


def entries(workdir: Path) -> Iterator[Entry]:
    """All checkpoints of a workdir, also unfinished ones and those set aside, by folder and step."""
    for folder in FOLDERS:
        for path in _folders(workdir, folder):
            yield _entry(path, folder)


def finished(workdir: Path, step: int | None = None) -> list[Path]:
    """The folders of finished checkpoints from which fiddlex reads, or that of `step`; CheckpointError without any."""
    paths = [path for folder in USABLE for path in _folders(workdir, folder) if is_step(path.name)]
    chosen = [path for path in paths if step is None or int(path.name) == step]
    if not chosen and not paths:
        raise CheckpointError(f"{workdir} has no finished checkpoint. Name the --workdir of a run that has saved one.")
    if not chosen:
        steps = list(dict.fromkeys(path.name for path in paths))
        there = f"that of step {steps[0]}" if len(steps) == 1 else f"those of steps {', '.join(steps)}"
        raise CheckpointError(f"{workdir} has no finished checkpoint of step {step}. It has {there}.")
    return chosen


def verify(path: Path, told: Progress = lambda what, size: None) -> Verdict:
    """Compares each file and array of a checkpoint with what was recorded when it was saved; calls `told` after it."""
    start = time.monotonic()
    files = damaged_files(path, told=told)
    arrays: dict[str, str] = {}
    unreadable: dict[str, str] = {}
    num_arrays = num_bytes = num_files = 0
    try:
        meta = read_meta(path)
    except (OSError, ValueError, KeyError, RecursionError) as error:
        arrays["meta"] = first_line(error)
    else:
        stored = StoredArrays(path, meta)
        for name in stored.names:
            try:
                x = stored.read(name)
            except Exception as error:  # tensorstore raises various errors for a damaged file
                unreadable[name] = first_line(error)
                continue
            num_arrays, num_bytes = num_arrays + 1, num_bytes + x.nbytes
            told(name, x.nbytes)
            if reason := other_checksum(x, meta["checksums"][name]):
                arrays[name] = reason
    if LIST not in files:
        num_files = len(read_list(path))
    return Verdict(path, num_arrays, num_bytes, num_files, files, arrays, unreadable, time.monotonic() - start)


def _folders(workdir: Path, name: str) -> list[Path]:
    """The folders of checkpoints in a folder of a workdir, in the order of their steps."""
    if not workdir.is_dir():
        raise CheckpointError(f"{workdir} is not a directory. Name the --workdir of a run.")
    try:
        found = [path for path in (workdir / name).iterdir() if path.is_dir()] if (workdir / name).is_dir() else []
    except OSError as error:
        raise CheckpointError(f"Cannot read {error.filename}: {error.strerror}.") from error
    return sorted(found, key=lambda path: (_number(path.name), path.name))


def _number(name: str) -> int:
    digits = name[: len(name) - len(name.lstrip("0123456789"))]
    return int(digits) if digits.isascii() and digits else -1


def _entry(path: Path, folder: str) -> Entry:
    size, written = 0, 0.0
    for file in path.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # a run that writes or deletes it now
            if file.is_file():
                size, written = size + file.stat().st_size, max(written, file.stat().st_mtime)
    if folder == FOLDERS[-1]:
        state = "set aside"
    elif is_unfinished(path):
        state = "unfinished"
    else:
        state = "finished" if is_step(path.name) else "renamed"
    entry = Entry(path, state, size, written)
    if state == "unfinished":
        return entry
    try:
        meta = read_meta(path)
    except (OSError, ValueError, KeyError, RecursionError) as error:
        return dataclasses.replace(entry, reason=first_line(error))
    stored = StoredArrays(path, meta)
    parts = tuple(dict.fromkeys(name.partition(".")[0] for name in meta["checksums"]))
    dtypes: dict[str, list[str]] = {part: [] for part in parts}
    for name in stored.names:
        part = name.partition(".")[0]
        try:
            dtype = stored.dtype(name).name
        except Exception:  # tensorstore raises various errors for a damaged file, in words of its own
            there = (
                "files in it are missing or damaged, which verify names" if (path / part).is_dir() else "it is missing"
            )
            return dataclasses.replace(entry, reason=f"{part}/: {there}")
        if dtype not in dtypes[part]:
            dtypes[part].append(dtype)
    return dataclasses.replace(
        entry, step=meta["step"], parts=parts, dtypes=dtypes, num_parameters=_num_parameters(meta)
    )


def _num_parameters(meta: Meta) -> int | None:
    if "shapes" not in meta:  # earlier versions of fiddlex saved none
        return None
    layers = meta["layers"]
    total = 0
    for name, shape in meta["shapes"].items():
        if name.startswith("weights."):
            padded = len(layers) and name.startswith("weights.layers.")
            rows = sum(layer != PADDING for layer in layers) if padded else 0
            total += rows * math.prod(shape[1:]) if padded else math.prod(shape)
    return total
