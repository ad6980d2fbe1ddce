"""Steps that went wrong: what a run skipped, and the batches that it left out after a rollback.

A fault is a step whose loss or gradient is not finite, or a spike. With `skip` the step changes no weight, and the run
goes on. With `rollback` the run goes back to the last good checkpoint and leaves the batch of that step out: the
batches after it move up, so every later step trains on the batch after the one that it would have had.

The faults are in `faults.json` in the workdir. A run that is resumed from a checkpoint leaves the same batches out, and
skips the same steps again, since the train step decides that from its state and its batch alone.
"""

import json
from pathlib import Path
from typing import Literal, NamedTuple

from fiddlex.cluster import processes
from fiddlex.config import TrainConfig
from fiddlex.errors import CheckpointError
from fiddlex.files.small_files import read_small
from fiddlex.files.whole_files import write_whole
from fiddlex.train.run.workdir import writing

FILE = "faults.json"
KINDS = ("nonfinite", "spike")


class Fault(NamedTuple):
    """A step that went wrong, and what the run did."""

    step: int  # counted from 1
    batch: int  # counted from 0
    kind: str  # of `KINDS`
    action: Literal["skip", "rollback"]


class Faults:
    """The faults of a run. All processes have the same; the first one writes the file.

    Steps that were skipped after `resumed_step` are forgotten, since the run takes them again. The constructor and
    every method raise CheckpointError when the file cannot be written or is damaged.
    """

    def __init__(self, workdir: Path, config: TrainConfig, *, resumed_step: int):
        self.path, self.limit = workdir / FILE, config.max_faults
        self._faults = [Fault(*each) for each in processes.told_by_first("faults of the run", self._read)]
        self.resume(resumed_step)

    @property
    def left_out(self) -> tuple[int, ...]:
        """The numbers of the batches that the run leaves out, in ascending order."""
        return tuple(sorted(fault.batch for fault in self._faults if fault.action == "rollback"))

    @property
    def first_beyond_limit(self) -> Fault | None:
        """The fault that is one more than `train.max_faults`; None while the run has no more than these."""
        return self._faults[self.limit] if len(self._faults) > self.limit else None

    def resume(self, step: int) -> None:
        """Notes that the run goes on from `step`; at 0 it starts anew, without any fault."""
        kept = [fault for fault in self._faults if step and (fault.action == "rollback" or fault.step <= step)]
        if kept != self._faults:
            self._faults = kept
            self._write()

    def add(self, fault: Fault) -> None:
        self._faults.append(fault)
        self._write()

    def go_back(self, step: int, fault: Fault) -> None:
        """Records a fault because of which the run goes on from `step`, and forgets the skips after that step."""
        self._faults = [each for each in self._faults if each.action == "rollback" or each.step <= step]
        self.add(fault)

    def _read(self) -> list[Fault]:
        if not self.path.exists():
            return []
        try:
            return _parsed(read_small(self.path))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise CheckpointError(
                f"{self.path} is damaged. It says which batches this run leaves out; put back an intact copy, or "
                "remove it if the run never went back to a checkpoint because of a fault."
            ) from error

    def _write(self) -> None:
        if not processes.is_first():
            return
        with writing(self.path):
            write_whole(self.path, json.dumps([fault._asdict() for fault in self._faults], indent=1) + "\n")


def _parsed(text: str) -> list[Fault]:
    """The faults in a file; raises ValueError or TypeError for a text that no run writes."""
    listed = json.loads(text)
    if not isinstance(listed, list):
        raise ValueError("not a list")
    faults = [Fault(**each) for each in listed]
    left_out = [fault.batch for fault in faults if fault.action == "rollback"]
    if not all(map(_is_valid, faults)) or len(set(left_out)) < len(left_out):
        raise ValueError("a fault that no run has")
    return faults


def _is_valid(fault: Fault) -> bool:
    numbers = type(fault.step) is type(fault.batch) is int and fault.step >= 1 and fault.batch >= 0
    return numbers and fault.kind in KINDS and fault.action in ("skip", "rollback")
