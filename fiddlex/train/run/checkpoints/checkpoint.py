"""Checkpoints of a workdir: saved in the background, verified when read, resumable on another layout.

A checkpoint has the orbax items `weights` and `optimizer`, with global shapes, and with delayed weights one for each
older version; a JSON item `meta` (`meta.py`); and a list of its files (`file_digests.py`). It does not hold what is in
flight in a pipeline: a resumed run recomputes that from the same weights. Data order and dropout follow from the seeds
and the step, so the step is the only position to save.

A checkpoint of which a file or an array is not what was saved is passed over, and the newest undamaged one is used. Of
several processes each reads a part of the files to verify them, and then the parts of the arrays that its devices hold;
all pass over a checkpoint that one of them cannot read.
"""

import logging
import shutil
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from fiddlex.cluster import processes
from fiddlex.cluster.jax_settings import kept_settings
from fiddlex.errors import CheckpointError, DataError
from fiddlex.files.places import steps_in
from fiddlex.files.whole_files import unused
from fiddlex.parallel.sharding import on_devices
from fiddlex.train.run.checkpoints.checksums import checksums
from fiddlex.train.run.checkpoints.file_digests import damaged_files
from fiddlex.train.run.checkpoints.meta import META, About, Meta, arrays_of, items_of, named, read_meta
from fiddlex.train.run.checkpoints.reading import first_line, make_reader
from fiddlex.train.run.checkpoints.relayout import move_rows, saved_form
from fiddlex.train.run.checkpoints.writer import CheckpointWriter
from fiddlex.train.run.workdir import writing
from fiddlex.train.step.scaling import Scaling
from fiddlex.train.step.spikes import Usual
from fiddlex.train.step.state import SavedState

logger = logging.getLogger(__name__)

DAMAGED = "damaged_checkpoints"  # subdirectory of a workdir
STACKED = ("weights", "optimizer", "older", "last_update")  # the fields of a state with arrays that have rows of layers


class Checkpoints:
    """The checkpoints of one workdir. A context manager: leaving it waits for the background writer.

    `keep_last` and `keep_every` are those of `Kept`. The first save makes the directory `name` in the workdir. With
    `waits` each save is waited for, so that a copy on the devices would be of no use.
    """

    def __init__(
        self,
        workdir: Path,
        *,
        keep_last: int = 2,
        keep_every: int = 0,
        name: str = "checkpoints",
        waits: bool = False,
    ):
        self.directory = workdir.absolute() / name
        self._writer = CheckpointWriter(self.directory, keep_last=keep_last, keep_every=keep_every, waits=waits)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: object, value: BaseException | None, traceback: object) -> None:
        try:
            self.close()
        except CheckpointError as error:
            if value is None:
                raise
            logger.warning("%s", error)  # what ended the body comes first

    def steps(self) -> list[int]:
        """Steps that have a finished checkpoint, in ascending order."""
        return steps_in(self.directory)

    def path(self, step: int) -> Path:
        return self.directory / str(step)

    def save(
        self, state: SavedState, step: int, *, layers: Sequence[int], fingerprint: str, padded_vocab: int = 0
    ) -> None:
        """Takes a snapshot of the state, and writes it in the background; leaves out an empty `optimizer` or `older`.

        The other arguments are those of `About`. Raises CheckpointError when the directory cannot be written, or the
        previous background write failed.
        """
        self._writer.save(state, About(step, layers, fingerprint, padded_vocab))

    def restore_newest(
        self,
        abstract: SavedState,
        *,
        layers: Sequence[int],
        fingerprint: str = "",
        padded_vocab: int = 0,
        move_damaged: bool = False,
        only: int | None = None,
    ) -> SavedState | None:
        """The newest undamaged checkpoint, with the shapes and shardings of `abstract`; None without checkpoints.

        Args:
          abstract: ShapeDtypeStructs with shardings. With an empty `optimizer` (`()`), only the weights are read; of a
            checkpoint with weights alone, the result's `optimizer` is empty. Older weights are read only if the
            checkpoint has them, in the dtype in which they were saved.
          layers: the layer of each row of `abstract`; if the checkpoint has another order, its rows are moved.
          fingerprint: the fingerprint that the training data must have; empty to accept any data.
          padded_vocab: number of vocabulary rows in `abstract` (`About`); it may differ from the saved number.
          move_damaged: whether to move unreadable checkpoints into `DAMAGED`.
          only: the step of the only checkpoint to try.

        Raises:
          CheckpointError: when there are checkpoints but none can be read or is of the step `only`, or when the newest
            readable one belongs to another kind of optimizer, or a network with other parameters.
          DataError: when it belongs to other training data.
        """
        damaged: dict[int, str] = {}
        steps = processes.told_by_first(f"steps in {self.directory.name}", self.steps)
        if only is not None and only not in steps:
            raise CheckpointError(f"step={only}: {self.directory} has checkpoints of the steps {steps}.")
        for step in reversed(steps if only is None else [only]):
            try:
                state, reason = self._restore(step, abstract, layers, fingerprint, padded_vocab)
            except Exception:
                _warn_of(damaged)
                raise
            if state is not None:
                _warn_of(damaged, f" and moved to {DAMAGED}/" if move_damaged else "")
                if move_damaged:
                    self._move_aside(damaged)
                return state
            damaged[step] = f"{self.path(step)}: {reason}"
        if damaged:
            raise CheckpointError(
                f"None of the checkpoints under {self.directory} can be read:\n  "
                + "\n  ".join(damaged.values())
                + "\nPut back an intact copy, or choose a new --workdir to start again."
            )
        return None

    def is_writing(self) -> bool:
        return self._writer.is_writing()

    def has_failed(self) -> bool:
        return self._writer.has_failed()

    def wait(self) -> None:
        self._writer.wait()

    def close(self) -> None:
        self._writer.close()

    def set_aside(self, steps: Iterable[int]) -> None:
        """Moves unusable checkpoints to `DAMAGED`, next to `checkpoints`, and logs each move."""
        for step, target in self._move_aside(steps).items():
            if processes.is_first():
                logger.warning("Moved the checkpoint of step %d to %s.", step, target)

    def _move_aside(self, steps: Iterable[int]) -> dict[int, Path]:
        """Moves checkpoints to `DAMAGED`; returns the new path of each step's checkpoint."""
        self.close()  # an open manager does not look for changes on disk

        def move() -> list[tuple[int, str]]:
            moved = {step: unused(self.directory.with_name(DAMAGED), f"{step}-{{}}") for step in steps}
            for step, target in moved.items():
                with writing(target):
                    target.parent.mkdir(exist_ok=True)
                    shutil.move(self.path(step), target)  # copies where `checkpoints` is a link to another disk
            return [(step, str(target)) for step, target in moved.items()]

        moved = processes.told_by_first(f"checkpoints moved out of {self.directory.name}", move)
        return {step: Path(target) for step, target in moved}

    def _restore(
        self, step: int, abstract: SavedState, layers: Sequence[int], fingerprint: str, padded_vocab: int
    ) -> tuple[SavedState | None, str]:
        """The checkpoint of a step; None, and the reason, if a process cannot read it or it is not what was saved."""
        if reason := self._damaged_files(step, abstract):
            return None, reason
        read = None
        try:
            read = self._read(step, abstract, layers, fingerprint, padded_vocab)
        except (CheckpointError, DataError, MemoryError, jax.errors.JaxRuntimeError):  # the files are not to blame
            raise
        except Exception as error:  # orbax, tensorstore and json raise many kinds for a damaged file
            reason = first_line(error)
        # Whatever follows takes all processes, as does the reading of an earlier checkpoint.
        if reasons := self._gathered(step, reason):
            return None, reasons
        assert read is not None
        state, form, meta = read
        for name, value in checksums(arrays_of(state)).items():
            if value != meta["checksums"][name]:
                return None, f"{name} is not what was saved (checksum {value}, saved {meta['checksums'][name]})"
        if list(layers) != meta["layers"]:
            was, wanted = ({name: getattr(each, name) for name in STACKED} for each in (state, form))
            state = state._replace(**move_rows(was, wanted, layers, meta["layers"]))
        if abstract.optimizer and processes.is_first():
            _tell_settings(self.path(step), meta)
        return state, ""

    def _damaged_files(self, step: int, abstract: SavedState) -> str:
        """What is wrong with a file of the checkpoint that has to be read; empty when all are what was written."""
        wanted = {name for name, item in items_of(abstract).items() if item} | {META}
        share = jax.process_index(), jax.process_count()
        found = damaged_files(self.path(step), items=wanted, share=share)
        return self._gathered(step, "; ".join(f"{name}: {reason}" for name, reason in found.items()))

    def _gathered(self, step: int, reason: str) -> str:
        """Why the processes cannot read a checkpoint, of which each gives its reason or an empty text."""
        reasons = processes.gather(
            f"checkpoint of step {step} in {self.directory.name}", [reason, socket.gethostname()]
        )
        if len({reason for reason, _ in reasons}) == 1:
            return reason
        return "; ".join(f"on rank {rank} ({host}): {reason}" for rank, (reason, host) in enumerate(reasons) if reason)

    def _read(
        self, step: int, abstract: SavedState, layers: Sequence[int], fingerprint: str, padded_vocab: int
    ) -> tuple[SavedState, SavedState, Meta]:
        """This process's part of a checkpoint: the saved state, the form to give it, `meta`; waits for no process."""
        reader = make_reader()
        meta = read_meta(self.path(step))
        expected = meta["checksums"]
        if fingerprint and meta["fingerprint"] and meta["fingerprint"] != fingerprint:
            raise DataError(
                f"{self.path(step)} was trained on other data: fingerprint {meta['fingerprint']}, now {fingerprint}. "
                "The files that data.source names (for stdlib: the Python version) have changed since. Put them back "
                "to go on with this run, or choose a new --workdir."
            )
        abstract = _as_saved(abstract, meta)
        if not any(name.startswith("optimizer.") for name in expected):
            abstract = abstract._replace(optimizer=())  # weights alone, as from another program
        if different := sorted(set(arrays_of(abstract)) ^ {name for name in expected if _is_wanted(name, abstract)}):
            raise CheckpointError(_other_arrays(self.path(step), different))
        items = items_of(abstract)
        if list(layers) != meta["layers"]:
            items = saved_form(items, layers, meta["layers"])
        self._check_shapes(step, items, meta, padded_vocab)
        # strict=False lets orbax fit the padded vocabulary to this mesh; the checksums catch other truncation.
        restored = reader.restore(
            self.path(step),
            args=ocp.args.Composite(
                **{name: ocp.args.StandardRestore(item, strict=False) for name, item in items.items() if item},
            ),
        )
        state = SavedState(
            step=on_devices(np.int32(step), abstract.step.sharding),
            weights=restored["weights"],
            optimizer=restored["optimizer"] if abstract.optimizer else (),
            older={name: restored[name] for name in abstract.older},
            last_update=restored["last_update"] if abstract.last_update else {},
            scaling=_scaling(meta["scaling"]) if "scaling" in meta else (),
            usual=_usual(meta["usual"]) if "usual" in meta else (),
            switch=meta.get("switch", ()),
        )
        return state, abstract, meta

    def _check_shapes(self, step: int, items: dict[str, Any], meta: Meta, padded_vocab: int) -> None:
        """Raises CheckpointError when a saved shape differs by more than the padding of the vocabulary."""
        padding = meta.get("padded_vocab", 0), padded_vocab
        saved = meta.get("shapes", {})  # earlier versions of fiddlex saved none
        different = []
        for name, x in named(items).items():
            was, now = tuple(saved.get(name, x.shape)), tuple(x.shape)
            if len(was) != len(now) or any(a != b and (a, b) != padding for a, b in zip(was, now, strict=True)):
                different.append(f"{name} is {now}, was {was}")
        if different:
            different = [text for text in different if text.startswith("weights.")] or different
            raise CheckpointError(
                f"{self.path(step)} was made with another network, whose description has changed since:\n  "
                + "\n  ".join(different[:4])
                + "\nUse the description it was trained with to go on with this run, or choose a new --workdir."
            )


def _warn_of(damaged: Mapping[int, str], then: str = "") -> None:
    """Logs a line about each checkpoint that is passed over; `then` ends the sentence that says so."""
    if processes.is_first():
        for step, reason in damaged.items():
            text = "The checkpoint of step %d cannot be read and is passed over%s. %s"
            logger.warning(text, step, then, reason)


def _tell_settings(path: Path, meta: Meta) -> None:
    """Logs which of jax's settings were others when the checkpoint of a run that goes on was made."""
    now = kept_settings()
    was = {name: value for name, value in meta.get("settings", {}).items() if value != now.get(name, value)}
    for name, value in was.items():
        logger.warning(
            "%s=%s (%s) was %s when %s was made: from here on, the numbers are not those of an uninterrupted run.",
            *(name, now[name], name.upper(), value, path),
        )


def _other_arrays(path: Path, different: list[str]) -> str:
    """The error message for arrays that either the checkpoint or the state lacks."""
    weights = [name for name in different if name.startswith("weights.")]
    what, remedy = "another kind of optimizer state", "Set the optimizer's fields, or a rule of your own, back"
    if weights:
        what, remedy = "another network, whose description has changed since", "Use the description it was trained with"
    names = (weights or different)[:4]
    return (
        f"{path} was made with {what}: {', '.join(names)} {'is' if len(names) == 1 else 'are'} on one side only. "
        f"{remedy} to go on with this run, or choose a new --workdir."
    )


def _scaling(parts: list[Any]) -> Scaling:
    scales, good_steps = parts
    return Scaling(np.asarray(scales, np.float32), np.int32(good_steps))


def _usual(parts: list[Any]) -> Usual:
    loss, grad_norm, good_steps = parts
    return Usual(np.float32(loss), np.float32(grad_norm), np.int32(good_steps))


def _as_saved(abstract: SavedState, meta: Meta) -> SavedState:
    """`abstract` with the older weights and the last update that the checkpoint holds, in the checkpoint's dtype."""
    saved = {name.partition(".")[0] for name in meta["checksums"]}
    older = {
        name: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, meta["older_dtype"], sharding=x.sharding), weights)
        for name, weights in abstract.older.items()
        if name in saved
    }
    return abstract._replace(older=older, last_update=abstract.last_update if "last_update" in saved else {})


def _is_wanted(name: str, abstract: SavedState) -> bool:
    return bool(items_of(abstract).get(name.partition(".")[0]))
