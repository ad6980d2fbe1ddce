"""When a run saves: every N steps, or as often as its time for checkpoints allows (`train.checkpoint_every=auto`).

`auto` is CheckFreq (Mohan et al., FAST 2021) with measured costs. A save costs the time by which the steps around it
take longer than others: the copy that the devices wait for, and the work of the background writer beside the steps.
With cost C, the run saves every C / `train.checkpoint_overhead` seconds, so that checkpoints add at most that share to
the time of steps. It never starts a save before the last one is safe on disk. Costs and times are measured anew at each
save, so the interval grows when the disk slows down.

Where the mean time between failures M is known (`train.mean_time_to_failure_h`), a failure costs half an interval of
repeated steps on average. With an interval T, saves and repeated steps then add the share C / T + T / 2M to the time of
steps, which is least at √(2 C M) (Young, CACM 1974; Daly, FGCS 2006). Any other interval loses more, so a bound on
saves alone could only do harm, and a config that sets both is refused.

Invariant: all processes of a run save after the same steps. The first one decides, and tells the others.
"""

import collections
import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from fiddlex.cluster import processes
from fiddlex.config import TrainConfig
from fiddlex.config.values.every import Every
from fiddlex.terminal.readable import counted, readable_time

FIRST_STEPS = 20  # of a process, which are measured before its first save
_USUAL_STEPS = 50  # the last undisturbed ones, whose median is the time of a step
_COSTS = 3  # the last ones, of which the largest counts
_POLL_S = 1.0  # between two looks whether the last save is safe
_LEAST_S = 1e-6  # of a step, so that nothing is divided by 0


class Decision(NamedTuple):
    """What `auto` has found out and decided after a save."""

    steps: int  # from one save to the next
    step_s: float  # seconds of a step without saves
    cost_s: float  # seconds by which a save lengthens the steps around it
    write_s: float  # seconds from the beginning of a save until it is safe on disk
    overhead: float  # share of the time of steps that saves every `steps` steps add
    lost_s: float  # seconds of steps that a failure costs on average
    # share of the time of steps that saves and repeated steps add together; None where the time to failure is not known
    lost: float | None

    def to_record(self) -> dict[str, float]:
        record = {
            "checkpoint_interval": self.steps,
            "checkpoint_cost_s": self.cost_s,
            "checkpoint_write_s": self.write_s,
            "checkpoint_overhead": self.overhead,
            "expected_lost_s": self.lost_s,
        }
        return record if self.lost is None else record | {"expected_lost_share": self.lost}

    def __str__(self) -> str:
        every = counted(self.steps, "step") if self.steps > 1 else "step"
        text = (
            f"Checkpoints every {every} ({readable_time(self.steps * self.step_s)}): a save costs "
            f"{readable_time(self.cost_s)}, which adds {self.overhead:.1%} to the time of steps, and is on disk after "
            f"{readable_time(self.write_s)}. A failure would cost {readable_time(self.lost_s)} of steps on average"
        )
        if self.lost is None:
            return f"{text}."
        return f"{text}; saves and failures together add {self.lost:.1%} to the time of steps."


def choose(
    *, step_s: float, cost_s: float, write_s: float, overhead: float, mean_time_to_failure_s: float = 0.0
) -> Decision:
    """The decision for measured times.

    `overhead` is the share of the time of steps that saves may add, where the time to failure is not known (0).
    """
    wanted_s = math.sqrt(2 * cost_s * mean_time_to_failure_s) if mean_time_to_failure_s else cost_s / overhead
    steps = max(math.ceil(max(wanted_s, write_s) / step_s), 1)
    interval_s = steps * step_s
    share = cost_s / interval_s
    lost_s = interval_s / 2 + write_s  # a failure during the write goes back to the save before
    lost = share + lost_s / mean_time_to_failure_s if mean_time_to_failure_s else None
    return Decision(steps, step_s, cost_s, write_s, share, lost_s, lost)


class SaveInterval:
    """Decides after which steps a run saves. Only the first process asks `writes` whether a save is being written."""

    def __init__(
        self,
        config: TrainConfig,
        first_step: int,
        *,
        writes: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._every, self._overhead = Every(config.checkpoint_every), config.checkpoint_overhead
        self._failure_s = 3600 * config.mean_time_to_failure_h
        self._writes, self._clock = writes, clock
        self._steps_s: collections.deque[float] = collections.deque(maxlen=_USUAL_STEPS)
        self._costs_s: collections.deque[float] = collections.deque(maxlen=_COSTS)
        self._done_s: float | None = None  # when the last step was done, or what followed it; None before the first
        self._asked_step = first_step + FIRST_STEPS  # at which the first process decides again
        self._next_step = self._asked_step  # at which it saves
        self._saved_step = first_step
        self._begun_s = 0.0  # when the last save began
        self._held_s: float | None = None  # for which the last save held the run, while its cost is being measured
        self._beside_s: list[float] = []  # seconds of steps beside the writer
        self._num_measured = 0  # saves whose cost was measured; the first, which also compiles, counts until the second

    def is_due(self, step: int) -> bool:
        """Whether to save after `step`; all processes call this after each step, and get the same answer."""
        if not self._every.is_auto:
            return self._every > 0 and step % self._every == 0
        if step < self._asked_step:
            return False
        self._asked_step = processes.told_by_first("step of the next checkpoint", lambda: self._ask_again(step))
        return self._asked_step == step

    def _ask_again(self, step: int) -> int:
        """`step` to save now, or the later step at which to ask again."""
        if self._held_s is not None:  # the last save is not safe yet
            return step + max(math.ceil(_POLL_S / self._usual_s()), 1)
        return max(step, self._next_step)

    def step_done(self) -> Decision | None:
        """Notes that the devices have done a step; the first process gets a new decision once the last save is safe."""
        now, before_s = self._clock(), self._done_s
        self._done_s = now
        if not self._every.is_auto or not processes.is_first():
            return None
        if self._held_s is None:
            if before_s is not None:
                self._steps_s.append(now - before_s)
            return None
        assert before_s is not None  # `saving` has set it
        self._beside_s.append(now - before_s)
        if self._writes():
            return None
        slower_s = sum(self._beside_s) - len(self._beside_s) * self._usual_s()
        if self._num_measured == 1:
            self._costs_s.clear()
        self._num_measured += 1
        self._costs_s.append(max(self._held_s + slower_s, 0.0))
        self._held_s = None
        return self._decide(now - self._begun_s)

    @contextlib.contextmanager
    def excluding(self) -> Iterator[None]:
        """Leaves the time of the body, between two steps, out of the time of the second."""
        yield
        self._done_s = self._clock()

    @contextlib.contextmanager
    def saving(self, step: int) -> Iterator[None]:
        """Measures the body, which waits for `step`, if it is not done yet, and then begins to save."""
        begun_s = self._clock()
        yield
        self._done_s = self._clock()
        self._saved_step, self._begun_s = step, begun_s
        self._asked_step, self._next_step = step + 1, step + FIRST_STEPS
        self._held_s = self._done_s - begun_s
        self._beside_s.clear()

    def _decide(self, write_s: float) -> Decision:
        decision = choose(
            step_s=self._usual_s(),
            cost_s=max(self._costs_s),
            write_s=write_s,
            overhead=self._overhead,
            mean_time_to_failure_s=self._failure_s,
        )
        self._next_step = self._saved_step + decision.steps
        return decision

    def _usual_s(self) -> float:
        return max(statistics.median(self._steps_s), _LEAST_S)
