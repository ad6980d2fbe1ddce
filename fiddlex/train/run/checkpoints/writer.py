"""Writes the checkpoints of one directory in the background.

A save takes a snapshot of the state before it lets the training go on: a copy on the devices, where they have room for
it, and else a copy on the host (`snapshot.py`). A thread, and then those of orbax, write the snapshot. Before its first
save, a run removes what killed processes have left of unfinished checkpoints.

Invariant: at most one checkpoint is being written. Its error is raised once, by the next call of `wait`, `save` or
`close`.
"""

import concurrent.futures
import contextlib
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from fiddlex.cluster import processes
from fiddlex.errors import CheckpointError
from fiddlex.train.run.checkpoints.checksums import checksum, checksums
from fiddlex.train.run.checkpoints.file_digests import is_unfinished, record_all, record_own
from fiddlex.train.run.checkpoints.kept_steps import Kept
from fiddlex.train.run.checkpoints.meta import About, arrays_of, items_of, make_meta
from fiddlex.train.run.checkpoints.reading import barrier_of_writers, first_line
from fiddlex.train.run.checkpoints.snapshot import copied, has_room
from fiddlex.train.step.state import SavedState

logger = logging.getLogger(__name__)


class _Manager(ocp.CheckpointManager):
    """Orbax's manager, which saves at the steps that the run names, and never because of a signal.

    Orbax 0.11 fails to save in a run of several processes without jax's preemption service, which would take SIGTERM.
    """

    def reached_preemption(self, step: int) -> bool:
        return False


class CheckpointWriter:
    """Writes checkpoints to a directory, which the first save creates; with `waits`, from copies on the host alone."""

    def __init__(self, directory: Path, *, keep_last: int, keep_every: int, waits: bool):
        self._directory = directory
        self._kept = Kept(keep_last, keep_every)
        self._manager: ocp.CheckpointManager | None = None
        self._begun: concurrent.futures.Future[None] | None = None  # what a thread does before those of orbax
        self._pending = False  # whether a save was begun of which nobody knows yet how it has ended
        self._error: CheckpointError | None = None  # of the last save, if nobody was told
        self._saving = -1  # step of the checkpoint that is being written
        self._has_room = False if waits else None  # for a snapshot on the devices; None before the first save

    def save(self, state: SavedState, about: About) -> None:
        self.wait()
        self._saving = about.step  # orbax's threads read it
        if self._manager is None:
            self._manager = self._open()
        arrays = arrays_of(state)
        if self._has_room is None:
            self._has_room = has_room(arrays)
        if not self._has_room:
            try:
                self._write(state, about, checksums(arrays))
            except CheckpointError:
                self._manager = None  # it would go on waiting for the end of this save
                raise
            self._pending = True
            return
        # The devices do this before the next step, and the host does not wait for it.
        sums = {name: checksum(x) for name, x in arrays.items()}
        snapshot = copied(state._replace(switch=()))._replace(switch=state.switch)
        thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._begun, self._pending = thread.submit(self._write, snapshot, about, sums), True
        thread.shutdown(wait=False)  # it ends when it has done this

    def _write(self, state: SavedState, about: About, sums: dict[str, Any]) -> None:
        """Copies the state to the host, and lets orbax's threads write it."""
        assert self._manager is not None
        items = {name: ocp.args.StandardSave(item) for name, item in items_of(state).items() if item}
        with self._explained():
            meta = make_meta(state, about, {name: int(value) for name, value in sums.items()})
            saved = self._manager.save(about.step, args=ocp.args.Composite(**items, meta=ocp.args.JsonSave(meta)))
        if not saved:  # orbax returns False, without a reason, if there are later checkpoints
            raise CheckpointError(
                f"{self._directory} has checkpoints of steps after {about.step}, which were not there when the run "
                "began: is another process writing there? Move them away and run the same command again."
            )

    def is_writing(self) -> bool:
        """Whether the last checkpoint is not on disk yet, or could not be written and nobody was told."""
        self._collect(wait=False)
        return self._pending or self._error is not None

    def has_failed(self) -> bool:
        """Whether the last checkpoint could not be written and nobody was told; `wait` then raises the error."""
        self._collect(wait=False)
        return self._error is not None

    def wait(self) -> None:
        """Waits until everything is on disk; raises CheckpointError, once, if the last write has failed."""
        self._collect(wait=True)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _collect(self, *, wait: bool) -> None:
        """Notes how the save in the background has ended, if it has ended or `wait` says to wait for it."""
        manager, begun = self._manager, self._begun
        if not self._pending or manager is None:
            return
        if not wait and ((begun is not None and not begun.done()) or manager.is_saving_in_progress()):
            return
        try:
            if begun is not None:
                begun.result()
            with self._explained():
                manager.wait_until_finished()
        except CheckpointError as error:
            self._error, self._manager = error, None  # the manager would raise the error again and again
        self._pending, self._begun = False, None

    def close(self) -> None:
        """Does what `wait` does, and ends orbax's threads; a later save starts new ones."""
        self.wait()
        manager, self._manager = self._manager, None
        if manager is not None:
            with self._explained():
                manager.close()

    def _open(self) -> ocp.CheckpointManager:
        everyone = ocp.options.MultiprocessingOptions(active_processes=set(range(jax.process_count())))
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self._kept,
            create=False,
            # Where the processes are named, they wait for each other by the coordinator. By default orbax runs a
            # program on the devices for it, which a thread must not start beside the train step.
            multiprocessing_options=everyone,
            async_options=ocp.AsyncOptions(
                barrier_sync_fn=barrier_of_writers(self._record_own),
                post_finalization_callback=lambda: record_all(self._directory, self._saving),
            ),
        )
        with self._explained():
            self._directory.mkdir(parents=True, exist_ok=True)
            if processes.is_first():
                self._remove_unfinished()
            return _Manager(self._directory, options=options)

    def _remove_unfinished(self) -> None:
        """Removes the folders of saves that were not finished; nothing is being written now."""
        unfinished = sorted(path for path in self._directory.iterdir() if is_unfinished(path))
        for path in unfinished:
            if path.is_symlink():
                path.unlink()
            else:
                shutil.rmtree(path)
        if unfinished:
            text = "Removed the unfinished checkpoints of interrupted saves in %s: %s."
            logger.info(text, self._directory, ", ".join(path.name for path in unfinished))

    def _record_own(self) -> None:
        if rank := jax.process_index():
            record_own(self._directory, self._saving, rank)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Raises the errors of the body, which for a full disk are of various kinds, as CheckpointError."""
        try:
            yield
        except Exception as error:
            raise CheckpointError(
                f"Cannot write a checkpoint under {self._directory}: {first_line(error)}. Earlier checkpoints are "
                "intact; make room or permit writing there, and run the same command again."
            ) from error
