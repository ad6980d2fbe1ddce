"""Where a run's numbers go: `metrics.jsonl`, TensorBoard, and Weights & Biases if asked for.

All processes of a run have the same numbers, and the first one writes them. A record is a flat dictionary with `step`.
Training records, evaluation records (those with `eval_loss`) and decisions about semantics (those with `semantics`) are
lines of the same file, in the order of their steps; the record of goodput (with `goodput`) is the last one. On resume,
the writer drops that record and the lines of steps that will be trained again, so that an interrupted run ends with the
same file as an uninterrupted one, the times aside. At Weights & Biases nothing can be dropped, so those steps are not
written a second time.
"""

import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from fiddlex.cluster import processes
from fiddlex.errors import CheckpointError
from fiddlex.files.whole_files import unused, write_whole
from fiddlex.train.record import Record, parse_record
from fiddlex.train.run.records.tensorboard import EventFile
from fiddlex.train.run.records.wandb_run import WandbRun
from fiddlex.train.run.workdir import writing

logger = logging.getLogger(__name__)

_MOST_LINE = 2**20  # bytes of a record


class MetricsWriter:
    """Writes records to a workdir. A context manager, which also closes `wandb_run`.

    When a run starts afresh (`resumed_step` is 0) in a directory with records of another run, it moves that file aside.
    The constructor and every method raise CheckpointError when the files cannot be written.
    """

    def __init__(self, workdir: Path, *, resumed_step: int, wandb_run: WandbRun | None = None):
        self.path = workdir / "metrics.jsonl"
        self.evaluations: list[Record] = []
        self._wandb_run = wandb_run
        self._dropped: set[tuple[int, frozenset[str]]] = set()  # steps and names of the records
        self._events_path = workdir / "tensorboard"
        self.evaluations = processes.told_by_first("evaluations of the run", lambda: self._opened(resumed_step))

    def _opened(self, resumed_step: int) -> list[Record]:
        """Opens the files; returns the evaluation records that stay."""
        with writing(self.path):
            if self.path.exists():
                self._keep_records_until(resumed_step)
            self._file = self.path.open("a", encoding="utf-8")
        with writing(self._events_path):
            self._events = EventFile(self._events_path, purge_step=resumed_step + 1)
        return self.evaluations

    def write(self, record: Record) -> None:
        if "eval_loss" in record:
            self.evaluations.append(record)
        if not processes.is_first():
            return
        self.check()
        with writing(self.path):
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        scalars = {name: x for name, x in record.items() if name != "step" and isinstance(x, int | float)}
        with writing(self._events_path):
            self._events.write(scalars, step=record["step"])
        if self._wandb_run and not (record["step"] <= self._wandb_run.written_step and _key(record) in self._dropped):
            self._wandb_run.write(scalars, step=record["step"])

    def check(self) -> None:
        """Raises CheckpointError, on the first process, when the file is gone."""
        if processes.is_first() and not self.path.exists():
            raise CheckpointError(
                f"{self.path} is gone: the workdir was removed or replaced during the run. Run the same command again, "
                "and leave its --workdir alone while it runs."
            )

    @property
    def evaluated_step(self) -> int:
        """The step of the last evaluation record, -1 when there is none."""
        return self.evaluations[-1]["step"] if self.evaluations else -1

    def _keep_records_until(self, step: int) -> None:
        kept, unreadable = [], 0
        for line in _lines(self.path):
            try:
                record = parse_record(line)
            except ValueError:  # the process was killed while it wrote this line
                unreadable += 1
                continue
            if record["step"] <= step and "goodput" not in record:
                kept.append(line.rstrip(b"\n") + b"\n")
                if "eval_loss" in record:
                    self.evaluations.append(record)
            else:
                self._dropped.add(_key(record))
        if unreadable:
            what = "line that is no record" if unreadable == 1 else "lines that are no records"
            logger.warning("%s: left out %d %s.", self.path, unreadable, what)
        if step == 0 and self.path.stat().st_size:
            aside = unused(self.path.parent, "metrics-{}.jsonl")
            logger.warning("The run starts again at step 0. Records of its steps so far are moved to %s.", aside)
            self.path.rename(aside)
        write_whole(self.path, b"".join(kept))

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not processes.is_first():
            return
        # When the run has already failed, an error from closing (mostly the same full disk) would hide the reason.
        ignored = contextlib.suppress(CheckpointError) if value else contextlib.nullcontext()
        with ignored, writing(self.path.parent), contextlib.ExitStack() as stack:
            if self._wandb_run:
                stack.callback(self._wandb_run.close, failed=value is not None)
            stack.callback(self._events.close)
            stack.callback(self._file.close)


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a file that are not blank; of a line that is longer than any record, pieces."""
    with path.open("rb") as file:
        while line := file.readline(_MOST_LINE):
            if line.strip():
                yield line


def _key(record: Record) -> tuple[int, frozenset[str]]:
    return record["step"], frozenset(record)


def describe_loss(record: Record) -> str:
    if record["loss"] is None:
        return "loss not finite"
    added = record.get("layer_loss")
    return f"loss {record['loss']:.4f}" + ("" if added is None else f" ({added:.4f} of layers)")


def describe(evaluation: Record) -> str:
    """The main numbers of an evaluation record as text: 'held-out loss 0.4312, accuracy 81.3%'."""
    text = f"held-out loss {evaluation['eval_loss']:.4f}"
    if "eval_pair_loss" in evaluation:
        text += f" (masked {evaluation['eval_masked_loss']:.4f}, pair {evaluation['eval_pair_loss']:.4f})"
    for name in ("eval_accuracy", "eval_masked_accuracy", "eval_pair_accuracy"):
        if name in evaluation:
            text += f", {name.removeprefix('eval_').replace('_', ' ')} {evaluation[name]:.1%}"
        if name == "eval_masked_accuracy" and "eval_masked_majority" in evaluation:
            text += f" (always the most common token: {evaluation['eval_masked_majority']:.1%})"
        if f"{name}_low" in evaluation:
            text += f" (95% interval {evaluation[f'{name}_low']:.1%} to {evaluation[f'{name}_high']:.1%})"
    return text
