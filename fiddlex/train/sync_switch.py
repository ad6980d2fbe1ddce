"""Decides during a run when to train synchronously and when under 2BW (`pipeline.semantics_schedule=auto`).

A run starts synchronous, since delayed weights cost most while the loss falls fast, and switches to 2bw when the loss
falls more slowly (Sync-Switch: Li et al., ICDCS 2021, which chooses the moment by search). The run's steps are cut into
windows of `pipeline.switch_window` steps. At the end of a window, where L is its mean training loss:

- Synchronous steps go over to 2bw if the warm-up of the learning rate is over and L is less than
  `pipeline.switch_threshold` below the mean loss of the window before, as a share of that loss.
- Steps under 2bw go back to synchronous ones if in two windows running L is more than that share above the lowest mean
  loss of any window of the run.

A decision takes effect once every batch that may have started by then has ended. Invariant: decisions follow from the
losses alone, at distances that are the same on every layout, so that the same run makes the same decisions however the
host and the devices are timed, and also when it is stopped and resumed on another layout.
"""

import dataclasses
from typing import Any

from fiddlex.config import Config
from fiddlex.schedules.semantics import AUTO_SEMANTICS, Phase
from fiddlex.train.record import Record

SYNC, DELAYED = AUTO_SEMANTICS
BAD_WINDOWS = 2
IN_FLIGHT = 2  # the most batches at once, on every layout: under 2bw, batch b starts after update b − 2


@dataclasses.dataclass(frozen=True)
class Decision:
    """A change of the semantics."""

    step: int  # number of steps after which it was decided
    semantics: str  # the semantics to come
    first_step: int  # the first step under them, counted from 1
    loss: float  # mean training loss of the window that decided
    change: float  # that loss against the one it was compared with, as a share; negative where the loss fell

    def to_record(self) -> Record:
        """The line of metrics.jsonl."""
        return {
            "step": self.step,
            "semantics": self.semantics,
            "semantics_from_step": self.first_step,
            "window_loss": self.loss,
            "window_change": self.change,
        }

    def __str__(self) -> str:
        if self.semantics == DELAYED:
            why = f"the mean loss of the last window is {self.change:+.2%} from that of the window before"
        else:
            why = f"in {BAD_WINDOWS} windows running the mean loss was above the lowest, at last by {self.change:.2%}"
        return f"step {self.step}: {why}; {self.semantics} from step {self.first_step}"


class SyncSwitch:
    """The decisions of one run."""

    def __init__(self, config: Config, phases: tuple[Phase, ...]):
        self._window, self._threshold = config.pipeline.switch_window, config.pipeline.switch_threshold
        self._warmup, self._num_steps = config.optimizer.warmup_steps, config.train.num_steps
        self.phases = phases  # of the run, as far as they are decided
        self._losses: list[float] = []  # of the window that is not yet full
        self._means: list[float] = []  # the lowest mean of a window, and the last one
        self._bad = 0

    def observe(self, step: int, loss: float | None) -> Decision | None:
        """Takes the training loss of step number `step`, counted from 1; returns the decision made there, if any.

        A loss that is not finite, None, counts in no mean; a window of such losses alone is passed over.
        """
        if loss is not None:
            self._losses.append(loss)
        if step % self._window or not self._losses:
            return None
        mean, self._losses = sum(self._losses) / len(self._losses), []
        if not self._means:
            self._means = [mean, mean]
            return None
        (lowest, last), self._means = self._means, [min(mean, self._means[0]), mean]
        running, first = self.phases[-1], step + IN_FLIGHT
        if first >= self._num_steps or step <= running.start:
            return None  # the run is about to end, or the last decision has not yet taken effect
        if running.semantics == SYNC:
            change = _rise(mean, last)
            switches = step >= self._warmup and -change < self._threshold
        else:
            change = _rise(mean, lowest)
            self._bad = self._bad + 1 if change > self._threshold else 0
            switches = self._bad == BAD_WINDOWS
        if not switches:
            return None
        self._bad = 0
        following = DELAYED if running.semantics == SYNC else SYNC
        self.phases = (*self.phases[:-1], running._replace(end=first), Phase(following, first, self._num_steps))
        return Decision(step, following, first + 1, mean, change)

    def saved(self) -> dict[str, Any]:
        """What a checkpoint holds, as JSON: copies, since a checkpoint is written while later steps run."""
        phases = list(map(list, self.phases))
        return {"phases": phases, "losses": list(self._losses), "means": list(self._means), "bad": self._bad}

    def restore(self, saved: dict[str, Any]) -> None:
        """Goes on from what `saved` returned, with the number of steps that the config now says."""
        *before, running = (Phase(*phase) for phase in saved["phases"])
        self.phases = (*before, running._replace(end=max(self._num_steps, running.start + 1)))
        self._losses, self._means, self._bad = list(saved["losses"]), list(saved["means"]), saved["bad"]


def _rise(mean: float, before: float) -> float:
    """How far a mean loss is above an earlier one, as a share of that; 1 where the loss rises from 0."""
    return mean / before - 1 if before else float(mean > 0)
