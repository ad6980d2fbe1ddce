"""What a clock returns: when each rank ran each action, and the bubbles and memory that follow from it.

Invariant: a `Timeline` holds only times, so its bubbles and memory are computed in the same way for every clock.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fiddlex.schedules.schedule import Action, Kind, Schedule

# What a bubble is, for people, wherever fiddlex prints one: `Timeline.bubble_fraction`, and `Steady.bubble_fraction`.
BUBBLE = "the time of a batch beyond the work of the busiest rank, divided by that work"
# What the time of a batch is in it, by clock.
BATCH_TIMES = {
    "free_running": "free-running, it is the longest from a rank's first action to its last",
    "lockstep": "in lockstep, it is the makespan",
}


def bubble_in(clocks: Iterable[str]) -> str:
    """The definition of a bubble in a line for people, with what the time of a batch is in these clocks."""
    return "; ".join([BUBBLE, *(BATCH_TIMES[clock] for clock in clocks)])


class Event(NamedTuple):
    """One action and when it ran."""

    action: Action
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """When each rank ran each of its actions, and what follows from that."""

    schedule: Schedule
    events: tuple[tuple[Event, ...], ...]  # [rank][number], in order of time; the events of one rank never overlap
    tick_starts: tuple[float, ...] = ()  # if all ranks step together (`lockstep`), else empty
    # End of the last tick and of the copies after it, if all ranks step together; None: that of the last action.
    end: float | None = None
    ticks_end: float | None = None  # end of the last tick, if all ranks step together
    shared: float = 0.0  # total time, over all ticks, in which all ranks together embed and score

    @functools.cached_property
    def makespan(self) -> float:
        """The time at which all work is done, copies to the host included.

        The first action starts at 0, or when the first weights have come from the host.
        """
        return max(row[-1].end for row in self.events) if self.end is None else self.end

    @functools.cached_property
    def work(self) -> tuple[float, ...]:
        """The time for which each rank computes."""
        return tuple(math.fsum([self.shared, *(event.end - event.start for event in row)]) for row in self.events)

    @property
    def ideal(self) -> float:
        """Work of the busiest rank: no order can be faster. With equal stages, the work of any rank."""
        return max(self.work)

    @property
    def batch_time(self) -> float:
        """The time that a batch takes: the longest from a rank's first action to its last; in lockstep, the makespan.

        The time is that of one rank, as in the zero-bubble paper (whose cost is the longest time of any stage), since a
        rank that ends early starts the next batch early. In lockstep all ranks start and end together. If rank 0 starts
        first and ends last, as in GPipe, 1F1B, interleaved 1F1B and ZB-H1, the makespan is the same.
        """
        if self.tick_starts:
            return self.makespan
        return max(row[-1].end - row[0].start for row in self.events)

    @property
    def bubble(self) -> float:
        """`batch_time` − `ideal`."""
        return self.batch_time - self.ideal

    @property
    def bubble_fraction(self) -> float:
        """`bubble` divided by `ideal`: (p−1)/m for 1F1B (Narayanan et al., SC 2021, section 2.2)."""
        return self.bubble / self.ideal if self.ideal else 0.0

    @functools.cached_property
    def peak_inflight(self) -> tuple[float, ...]:
        """The most activations that each rank holds at once, in microbatches of the whole rank.

        On a rank with v stages, one chunk counts as 1/v of a microbatch. In lockstep this is what the executor's stash
        holds.
        """
        return self._peaks(activation=1, weight_gradient=0)

    @functools.cached_property
    def peak_weight_stash(self) -> tuple[float, ...]:
        """The most microbatches for which each rank holds what an I saves for its W, counted as in `peak_inflight`."""
        return self._peaks(activation=0, weight_gradient=1)

    def memory(
        self,
        rank: int,
        *,
        activation: float | Sequence[float] = 1,
        weight_gradient: float | Sequence[float] = 0,
    ) -> list[tuple[float, float]]:
        """Returns what `rank` holds over time: the times at which the amount changes, each with the amount after it.

        The activations of a chunk are held from the start of its F to the end of its B or W, since the weight gradient
        needs them too. What an I saves for its W is held from the start of I to the end of W. The default amounts count
        activations, the amounts 0 and 1 count what each I saves, and amounts in bytes give the memory. At equal times
        an end is listed before a start, so the amount at a time is the last one listed at or before that time.

        Args:
          rank: the rank whose memory is computed.
          activation: amount for the activations of one chunk and microbatch: one for all stages, or one for each stage.
          weight_gradient: amount for what an I saves for its W: one for all stages, or one for each stage.
        """
        activations, weight_gradients = (
            [amount] * self.schedule.num_stages if isinstance(amount, int | float) else amount
            for amount in (activation, weight_gradient)
        )
        changes = {
            Kind.F: activations,
            Kind.B: [-amount for amount in activations],
            Kind.I: weight_gradients,
            Kind.W: [-amount - left for amount, left in zip(activations, weight_gradients, strict=True)],
        }
        curve: list[tuple[float, float]] = []
        held: float = 0
        for (stage, kind, _), start, end in self.events[rank]:
            change = changes[kind][stage]
            if change:
                held += change
                curve.append((start if change > 0 else end, held))
        return curve

    def _peaks(self, *, activation: float, weight_gradient: float) -> tuple[float, ...]:
        peaks = []
        for rank in range(self.schedule.num_ranks):
            curve = self.memory(rank, activation=activation, weight_gradient=weight_gradient)
            peaks.append(max((held for _, held in curve), default=0) / len(self.schedule.stages_of(rank)))
        return tuple(peaks)
