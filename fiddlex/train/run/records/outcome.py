"""How a run ended: its last numbers, as JSON and as a sentence for people."""

import dataclasses
import signal
from pathlib import Path

from fiddlex.cluster import processes
from fiddlex.cluster.peers import StopRequest
from fiddlex.config import Config
from fiddlex.terminal.readable import counted, readable_time
from fiddlex.train.record import Record
from fiddlex.train.run.best import DIRECTORY
from fiddlex.train.run.records.metrics import describe, describe_loss


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    step: int  # number of steps done, skipped ones too
    # the signal that stopped the run before its end, and the rank that received it; None when the run reached its end
    stopped_by: StopRequest | None
    record: Record | None  # the last training record; None when the run took no step
    # the last evaluation record, or with `train.patience` the best one; None when the run evaluated nothing
    evaluation: Record | None
    sample: str  # text sampled at the end; empty unless the config asks for a sample
    # how the wall time was spent (`goodput.py`); None when the run took no step, and on all processes but the first
    goodput: Record | None

    def to_dict(self) -> Record:
        """One flat JSON object: the last record and evaluation, goodput, how the run ended, and the sample."""
        end = {"step": self.step, "interrupted": self.stopped_by is not None, "sample": self.sample}
        if self.evaluation:
            end["eval_step"] = self.evaluation["step"]
        return (self.record or {}) | (self.evaluation or {}) | (self.goodput or {}) | end

    def summary(self, config: Config, workdir: Path, seconds: float) -> str:
        """How the run ended, as a sentence for people; `seconds` is the time that it took."""
        parts = [f"Done: step {self.step}"]
        if self.stopped_by:
            rank = f" to rank {self.stopped_by.rank}" if processes.num_processes() > 1 else ""
            parts = [f"Stopped by {signal.Signals(self.stopped_by.signal).name}{rank} at step {self.step}"]
        if not self.stopped_by and self.step < config.train.num_steps:
            parts[0] += (
                f" of {config.train.num_steps}, as {counted(config.train.patience, 'evaluation')} got no better,"
            )
        parts[0] += f" after {readable_time(seconds)}"
        if self.record:
            parts.append(describe_loss(self.record))
        if self.evaluation:
            best = f"best at step {self.evaluation['step']}: " * bool(config.train.patience)
            parts.append(f"{best}{describe(self.evaluation)}")
        saved = "".join(f", {name}/" for name in ("checkpoints", DIRECTORY) if (workdir / name).exists())
        parts.append(f"metrics.jsonl{saved} in {workdir}")
        if self.stopped_by:
            parts.append("the same command goes on from there")
        return "; ".join(parts) + "."
