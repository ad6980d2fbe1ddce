"""The log of what a run has trained on, from which one can prove that each sample was seen once in an epoch.

With `data.log_samples`, each process appends a line of JSON to WORKDIR/samples/rank-N.jsonl for each step:

    {"rank": 0, "processes": 2, "attempt": 1790000000000000000, "start": 40, "step": 41, "rows": [0, 1],
     "samples": [[0, 17, 2, 3735928559], [0, 3, 2, 195894762]]}

`step` counts from 1, as in metrics.jsonl. Each row of the batch that the process holds has the number of its source in
a blend (0 without), of the example in the source and of its epoch, and the CRC-32 of its fields as they go to the
devices. They come with the batch from where it was prepared, through caches and other runs. `attempt` is the same for
all processes that started together, and larger after a restart (nanoseconds since 1970); `start` is the step that the
attempt went on from. Processes that hold the same rows, as with pipeline parallelism, each log them.

Guarantee: a line has been handed to the operating system before its batch goes to the devices. So a process that is
killed at any moment has logged every step that it has trained on; with a power failure the last seconds may be lost.
Lines may be there of a few steps that were prepared and not trained on; a restart logs those steps again, with the same
rows and samples. The last line of a killed process may be cut short; the next attempt begins a new line.
"""

import errno
import json
import os
import time
import weakref
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fiddlex.cluster import processes
from fiddlex.data.loader import SAMPLES, Batch
from fiddlex.errors import DataError
from fiddlex.files.small_files import check_regular

FOLDER = "samples"


class Sample(NamedTuple):
    """An example that a step was trained on."""

    source: int  # number of the source in a blend
    number: int  # of the example in the source
    epoch: int  # of the source
    checksum: int  # CRC-32 of the example's fields


class SampleLog:
    """Writes the log of this process. All processes of the run must construct it at the same point.

    The run goes on from `start_step`, and this process holds `rows` of each batch. The constructor and `write` raise
    DataError when the file cannot be written.
    """

    def __init__(self, workdir: Path, *, rank: int, start_step: int, rows: Sequence[int]):
        self._path = workdir / FOLDER / f"rank-{rank}.jsonl"
        attempt = processes.told_by_first("attempt of the log of samples", time.time_ns)
        self._facts = {"rank": rank, "processes": processes.num_processes(), "attempt": attempt, "start": start_step}
        self._rows = list(rows)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.exists():
                check_regular(self._path)
            # A link there would let the run write elsewhere.
            opened = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            self._file = os.fdopen(opened, "a+b", buffering=0)
            weakref.finalize(self, self._file.close)
            if self._file.seek(0, os.SEEK_END):
                self._file.seek(-1, os.SEEK_END)
                if self._file.read() != b"\n":
                    self._file.write(b"\n")
        except (OSError, ValueError) as error:
            raise self._unwritable(error) from error

    def write(self, step: int, batch: Batch) -> Batch:
        """Logs the batch that `step`, counted from 1, is trained on; returns it without the field `SAMPLES`."""
        fields = {name: values for name, values in batch.items() if name != SAMPLES}
        samples = [
            [*numbers, example_checksum({name: values[row] for name, values in fields.items()})]
            for row, numbers in enumerate(batch[SAMPLES].tolist())
        ]
        facts = self._facts | {"step": step, "rows": self._rows, "samples": samples}
        line = json.dumps(facts).encode() + b"\n"
        try:
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise self._unwritable(error) from error
        return fields

    def _unwritable(self, error: OSError | ValueError) -> DataError:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        return DataError(
            f"Cannot write {self._path}: {reason}. Make room or permit writing there, or set data.log_samples=False."
        )


def example_checksum(example: Batch) -> int:
    """The CRC-32 of the fields of an example, in the order of their names."""
    checksum = 0
    for name in sorted(example):
        checksum = zlib.crc32(np.ascontiguousarray(example[name]).tobytes(), zlib.crc32(name.encode(), checksum))
    return checksum


def read_sample_log(workdir: Path, *, batch_size: int, rolled_back: bool = False) -> dict[int, list[Sample]]:
    """The samples of each step that was logged in full: for each step, counted from 1, those of all rows in order.

    Args:
      workdir: the directory of the run.
      batch_size: `data.global_batch_size` of the run.
      rolled_back: whether the run has left batches out after a rollback (`train.on_spike`, `train.on_nonfinite`). The
        steps after it are then trained on other samples than before, and those of the last attempt count.

    Raises:
      DataError: when a log cannot be read or, unless `rolled_back`, attempts or processes differ in a row of a step.
    """
    steps: dict[int, dict[int, Sample]] = {}
    attempts: dict[tuple[int, int], int] = {}  # by step and row, the last one
    for path in sorted((workdir / FOLDER).glob("rank-*.jsonl")):
        try:
            check_regular(path)
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except (OSError, ValueError) as error:
            raise DataError(
                f"{path} cannot be read: {error}. Remove it, or put an intact copy in its place."
            ) from error
        for text in lines:
            try:
                line = json.loads(text)
            except ValueError:  # the process was killed while it wrote this line
                continue
            rows = steps.setdefault(line["step"], {})
            for row, numbers in zip(line["rows"], line["samples"], strict=True):
                sample, place = Sample(*numbers), (line["step"], row)
                if rolled_back and line["attempt"] >= attempts.get(place, line["attempt"]):
                    attempts[place], rows[row] = line["attempt"], sample
                elif not rolled_back and rows.setdefault(row, sample) != sample:
                    raise DataError(f"{path}: step {line['step']}, row {row} has {sample}, and also {rows[row]}.")
    full = {step: rows for step, rows in sorted(steps.items()) if len(rows) == batch_size}
    return {step: [rows[row] for row in range(batch_size)] for step, rows in full.items()}
