"""What a clock gives: when each rank ran each action, and the bubbles and memory that follow.

Invariant: a `Timeline` is made of times only, so whatever made it, its bubbles and memory are counted in one way.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from fiddlex.schedules.schedule import Action, Kind, Schedule


class Event(NamedTuple):
    """One action and when it ran."""

    action: Action
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """When each rank ran each of its actions, and what follows from that.

    Attributes:
      schedule: what was run.
      events: [rank][number], in order of time; those of one rank never overlap.
      tick_starts: when each tick starts, where all ranks step together (`lockstep`); else empty.
      end: of the last tick; else that of the last action.
      shared: time in which all ranks together embed and score, in ticks.
    """

    schedule: Schedule
    events: tuple[tuple[Event, ...], ...]
    tick_starts: tuple[float, ...] = ()
    end: float | None = None
    shared: float = 0.0

    @functools.cached_property
    def makespan(self) -> float:
        """When all is done; the first action starts at 0."""
        return max(row[-1].end for row in self.events) if self.end is None else self.end

    @functools.cached_property
    def work(self) -> tuple[float, ...]:
        """Time that each rank computes."""
        return tuple(math.fsum([self.shared, *(event.end - event.start for event in row)]) for row in self.events)

    @property
    def ideal(self) -> float:
        """Work of the busiest rank: no order can be faster. With equal stages, the work of any rank."""
        return max(self.work)

    @property
    def bubble(self) -> float:
        """Longest time from the first action of a rank to its last, less `ideal`; in lockstep makespan − `ideal`.

        Taken over a rank's own span, as the zero-bubble paper does (its cost is the longest time of any stage): ranks
        that end early go on to the next batch early. In lockstep they start and end together. Where rank 0 starts first
        and ends last, as in GPipe, 1F1B, interleaved 1F1B and ZB-H1, both are the same.
        """
        spans = [self.makespan] if self.tick_starts else [row[-1].end - row[0].start for row in self.events]
        return max(spans) - self.ideal

    @property
    def bubble_fraction(self) -> float:
        """`bubble` over `ideal`: (p−1)/m for 1F1B (Narayanan et al., SC 2021, section 2.2)."""
        return self.bubble / self.ideal if self.ideal else 0.0

    @functools.cached_property
    def peak_inflight(self) -> tuple[float, ...]:
        """Most activations that each rank holds, in microbatches of the whole rank.

        One chunk of a rank with v stages is 1/v of a microbatch. In lockstep it is what the executor's stash holds.
        """
        return self._peaks(activation=1, weight_gradient=0)

    @functools.cached_property
    def peak_weight_stash(self) -> tuple[float, ...]:
        """Most microbatches for which each rank holds what I leaves for W, counted as `peak_inflight`."""
        return self._peaks(activation=0, weight_gradient=1)

    def memory(
        self,
        rank: int,
        *,
        activation: float | Sequence[float] = 1,
        weight_gradient: float | Sequence[float] = 0,
    ) -> list[tuple[float, float]]:
        """What `rank` holds over time: each time at which it changes, and the amount after.

        The activations of a chunk are held from the start of its F to the end of its B, or of its W: the weight
        gradient needs them too. What I leaves for W is held from the start of I to the end of W. The defaults count
        activations; 0 and 1 count what I leaves; with bytes for both it is memory. What ends at a time is given back
        before what starts at that time is taken, so the amount at a time is the last one listed for it or before it.

        Args:
          rank: whose memory.
          activation: amount for the activations of one chunk and microbatch: one for all stages, or one for each.
          weight_gradient: amount for what I leaves, likewise.
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
