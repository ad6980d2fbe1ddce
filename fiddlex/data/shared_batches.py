"""Several runs on one machine prepare each batch once for all: the coordinated preparation of CoorDL (VLDB 2021).

Runs that have the same batches (`batches_digest`), as in a search for a learning rate, meet in a folder. It holds

    members/NAME     a file for each run, locked as long as its process lives; int64: the first step it has not taken
    locks/NN         of the steps s with s mod `_SLOTS` = NN: whoever has the lock prepares the batch
    STEP.npz         a batch that some run still has to take

A run that needs a batch takes the file, or prepares the batch if it gets the lock. If another run has the lock, it
prepares one of the next batches meanwhile. The lock of a process that dies is free at once, and the next run takes
over; of a process that hangs the others wait for `_LEAST_PATIENCE_S` or ten times as long as a batch has taken them,
then prepare that batch themselves.

A batch is kept for the runs that need it within their next `KEPT` steps. So the folder holds at most `KEPT` batches for
each run, and a run that is slower than another by more than that, or that joins later, prepares its batches itself
until there are others near it.

Invariant: what a run trains on does not depend on the other runs. A batch is the same function of seed and step whoever
prepares it, a file has its name only when it is complete, its checksums are compared when it is read, and wherever a
batch cannot be had from the folder the run prepares it.
"""

import contextlib
import logging
import os
import secrets
import struct
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import numpy as np

from fiddlex.data.counts import PREPARED, TAKEN, DataCounts
from fiddlex.data.loader import Batch, prefetched
from fiddlex.errors import DataError
from fiddlex.files.file_locks import try_lock
from fiddlex.files.whole_files import replacing

logger = logging.getLogger(__name__)

KEPT = 16  # steps for which a batch waits for a run
_AHEAD = 8  # steps from the batch that a run waits for to the last one that it prepares meanwhile
_SLOTS = 64
_POLL_S = 0.001
_LEAST_PATIENCE_S, _PATIENCE = 2.0, 10  # seconds; times the longest preparation
_LEFTOVER_S = 600.0  # age of an incomplete file that nobody writes to any more
_POSITION = struct.Struct("<q")


def require_folder(folder: Path) -> None:
    """Makes the folder `data.share` if need be; raises DataError when this process cannot write there."""
    with _usable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


@contextlib.contextmanager
def _usable(folder: Path) -> Iterator[None]:
    """Turns an OSError in the body, which uses the folder `data.share`, into a DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"data.share={folder}: {error.strerror or error}. Name a folder of this machine in which this process may "
            "write, best below /dev/shm, or leave the field empty to prepare all batches alone."
        ) from error


class SharedBatches:
    """The batches of this run, prepared by it or by others; all methods may be called from several threads.

    Runs with another `digest` (`batches_digest`) do not meet this one in `folder`. `make` prepares the batch of a step,
    of `num_rows` examples; `counts` counts the examples.
    """

    def __init__(
        self,
        folder: Path,
        digest: str,
        *,
        make: Callable[[int], Batch],
        num_rows: int,
        num_threads: int,
        counts: DataCounts,
    ):
        self._folder = folder / digest
        self._members, self._locks = self._folder / "members", self._folder / "locks"
        self._make, self._num_rows, self._num_threads, self._counts = make, num_rows, num_threads, counts
        self._lock = threading.Lock()
        self._member: _Member | None = None
        self._stop = sys.maxsize
        self._longest_s = 0.0  # preparation of a batch
        self._given_up: set[int] = set()  # slots whose holder hangs
        self._own_ahead: set[int] = set()  # steps that this run has prepared ahead and not taken yet
        self._warned = False
        counts.add(PREPARED, 0)
        counts.add(TAKEN, 0)

    def iterate(self, start_step: int, *, num_steps: int | None = None) -> Generator[Batch, None, None]:
        """The batches of `start_step` and the following steps, see `Loader.iterate`."""
        self.join(start_step, num_steps=num_steps)
        try:
            yield from prefetched(self.batch, start_step, num_steps=num_steps, num_threads=self._num_threads)
        finally:
            self.leave()

    def join(self, step: int, *, num_steps: int | None = None) -> None:
        """Begins to take `num_steps` batches (None: unlimited), the first one that of `step`.

        Raises:
          DataError: when the folder cannot be used.
        """
        self.leave()
        with _usable(self._folder.parent):
            self._members.mkdir(parents=True, exist_ok=True)
            self._locks.mkdir(exist_ok=True)
            self._member = _Member(self._members, step)
            self._stop = sys.maxsize if num_steps is None else step + num_steps
            for other in self._folder.parent.glob("*/members"):
                if not list(_positions(other)):
                    _clear(other.parent)  # all its runs were killed

    def leave(self) -> None:
        """Ends taking batches: the others keep none for this run any more."""
        with self._lock:
            member, self._member = self._member, None
        if member:
            member.close()
            with contextlib.suppress(OSError):
                self._sweep()

    def batch(self, step: int) -> Batch:
        """The batch of `step`, from the folder or prepared here."""
        member = self._member
        if member is None:
            return self._prepared(step)
        try:
            batch = self._awaited(step)
        except OSError as error:
            self._warn(error)
            batch = self._prepared(step)
        member.took(step)
        try:
            self._sweep()
        except OSError as error:
            self._warn(error)
        return batch

    def _awaited(self, step: int) -> Batch:
        """The batch of `step`, once this or another run has prepared it."""
        asked_s, slot = time.monotonic(), step % _SLOTS
        while True:
            with self._preparing(step) as mine:
                batch = self._taken(step)
                if batch is None and mine:
                    self._given_up.discard(slot)
                    batch = self._prepared(step)
                    self._publish(step, batch, for_others=True)
            if batch is not None:
                return batch
            patience_s = 0.0 if slot in self._given_up else max(_LEAST_PATIENCE_S, _PATIENCE * self._longest_s)
            if time.monotonic() - asked_s > patience_s:
                self._given_up.add(slot)
                batch = self._prepared(step)
                self._publish(step, batch, for_others=True)
                return batch
            if not self._prepare_ahead(step):
                time.sleep(_POLL_S)

    def _taken(self, step: int) -> Batch | None:
        """The batch that another thread or run has prepared; None when there is none, or it is damaged."""
        try:
            with self._file(step).open("rb") as opened, np.load(opened, allow_pickle=False) as arrays:
                batch = dict(arrays)
        except FileNotFoundError:
            return None
        except Exception as error:  # numpy lets through whatever the parser of a header raises
            logger.warning("%s is damaged and is made again: %s", self._file(step), error)
            self._file(step).unlink(missing_ok=True)
            return None
        if step in self._own_ahead:
            self._own_ahead.discard(step)
        else:
            self._counts.add(TAKEN, self._num_rows)
        return batch

    def _prepared(self, step: int) -> Batch:
        start_s = time.monotonic()
        batch = self._make(step)
        self._longest_s = max(self._longest_s, time.monotonic() - start_s)
        self._counts.add(PREPARED, self._num_rows)
        return batch

    def _prepare_ahead(self, step: int) -> bool:
        """Prepares one of the batches after `step` that nobody prepares yet; returns whether there was one."""
        for later in range(step + 1, min(step + 1 + _AHEAD, self._stop)):
            if self._file(later).exists():
                continue
            with self._preparing(later) as mine:
                if mine and not self._file(later).exists() and self._is_needed(later, by_others=False):
                    with contextlib.suppress(DataError):  # it is raised when that batch is asked for
                        batch = self._prepared(later)
                        self._own_ahead.add(later)
                        if not self._publish(later, batch, for_others=False):
                            self._own_ahead.discard(later)
                        return True
        return False

    @contextlib.contextmanager
    def _preparing(self, step: int) -> Iterator[bool]:
        """Whether this thread has the lock of a step while the body runs."""
        file = os.open(self._locks / f"{step % _SLOTS:02d}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            yield try_lock(file)
        finally:
            os.close(file)

    def _is_needed(self, step: int, *, by_others: bool) -> bool:
        member = self._member
        own = member.name if by_others and member else ""
        return any(_keeps(first, step) for name, first in _positions(self._members) if name != own)

    def _publish(self, step: int, batch: Batch, *, for_others: bool) -> bool:
        """Writes a batch for the runs that need it, which prepare it themselves where that fails; whether it did."""
        if not self._is_needed(step, by_others=for_others):
            return False
        try:
            with replacing(self._file(step), shared=True) as opened:
                # Without allow_pickle=False, which numpy 2.0 would store as one more array.
                np.savez(opened, **batch)  # type: ignore[arg-type]
        except OSError as error:
            self._warn(error)
            return False
        return True

    def _sweep(self) -> None:
        """Removes the batches that no run needs, and what killed processes left."""
        firsts = [first for _, first in _positions(self._members)]
        for file in self._folder.iterdir():
            if file.suffix == ".npz" and file.stem.isdecimal():
                if not any(_keeps(first, int(file.stem)) for first in firsts):
                    file.unlink(missing_ok=True)
            elif file.suffix == ".tmp":
                with contextlib.suppress(FileNotFoundError):
                    if time.time() - file.stat().st_mtime > _LEFTOVER_S:
                        file.unlink()

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            text = "data.share=%s: %s. Each run prepares the batches that it does not find there."
            logger.warning(text, self._folder.parent, error.strerror or error)

    def _file(self, step: int) -> Path:
        return self._folder / f"{step}.npz"


def _keeps(first: int, step: int) -> bool:
    """Whether the batch of `step` is kept for a run that has taken all batches before `first`."""
    return first <= step < first + KEPT


class _Member:
    """A run in the folder, by its locked file."""

    def __init__(self, folder: Path, step: int):
        self.name = secrets.token_hex(8)
        self._path = folder / self.name
        self._first = step
        self._later: set[int] = set()  # steps taken after the first that was not
        self._lock = threading.Lock()
        hidden = folder / f".{self.name}"
        file = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._close = weakref.finalize(self, os.close, file)
        self._file = file
        try_lock(file)
        os.pwrite(file, _POSITION.pack(step), 0)
        hidden.rename(self._path)  # nobody looks at a hidden file, so it is locked when it is seen

    def took(self, step: int) -> None:
        """Notes that this run needs the batch of `step` no more."""
        with self._lock:
            self._later.add(step)
            before = self._first
            while self._first in self._later:
                self._later.remove(self._first)
                self._first += 1
            if self._first != before and self._close.alive:
                with contextlib.suppress(OSError):
                    os.pwrite(self._file, _POSITION.pack(self._first), 0)

    def close(self) -> None:
        with self._lock:
            self._path.unlink(missing_ok=True)
            self._close()


def _positions(members: Path) -> Iterator[tuple[str, int]]:
    """The name of each living run, and the first step that it has not taken; removes the files of dead ones."""
    for name in os.listdir(members):
        if name.startswith("."):  # of a run that is about to join
            continue
        with contextlib.suppress(FileNotFoundError):
            file = os.open(members / name, os.O_RDWR | os.O_CLOEXEC)
            try:
                if try_lock(file):
                    os.unlink(members / name)
                elif len(position := os.pread(file, _POSITION.size, 0)) == _POSITION.size:
                    yield name, *_POSITION.unpack(position)
            finally:
                os.close(file)


def _clear(folder: Path) -> None:
    for file in [*folder.glob("*.npz"), *folder.glob("*.tmp")]:
        file.unlink(missing_ok=True)
