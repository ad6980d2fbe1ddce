"""The free-running clock: what a schedule costs when every rank starts an action as soon as it can.

This is the clock of the papers' figures and formulas; the executor's lockstep ticks are another. A rank runs one action
at a time, in its order; a hop to the neighbouring rank takes time but keeps no rank busy. Invariant: a `Timeline` is
made of times only, so whatever made it, its bubbles and memory are counted in one way. Imports no jax.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

from fiddlex.errors import ScheduleError
from fiddlex.pipeline.schedule import Action, Kind, Schedule, execution_order
from fiddlex.pipeline.validate import validate


@dataclasses.dataclass(frozen=True)
class Costs:
    """Time of each kind of action, in any unit: one number for all stages, or one for each.

    The defaults are the papers' unit costs: a backward pass takes twice a forward, one part each for I and W.
    """

    forward: float | tuple[float, ...] = 1.0
    backward_input: float | tuple[float, ...] = 1.0
    backward_weight: float | tuple[float, ...] = 1.0
    hop: float | tuple[float, ...] = 0.0  # of a message that leaves the stage, either way, for another rank

    def per_stage(self, num_stages: int) -> dict[str, tuple[float, ...]]:
        """Every field as a tuple with one time for each stage.

        Raises:
          ScheduleError: when a tuple has another length, or a time is negative or not finite.
        """
        times = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            times[field.name] = value if isinstance(value, tuple) else (value,) * num_stages
            if len(times[field.name]) != num_stages:
                raise ScheduleError(
                    f"costs: {field.name} has {len(value)} times for {num_stages} stages: "
                    "give one for each stage, or a single number for all."
                )
            if not all(0 <= time < math.inf for time in times[field.name]):
                raise ScheduleError(f"costs: {field.name}={value} must be finite and at least 0.")
        return times


class Event(NamedTuple):
    """One action and when it ran."""

    action: Action
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """When each rank ran each of its actions, and what follows from that."""

    schedule: Schedule
    events: tuple[tuple[Event, ...], ...]  # [rank][position], as in the schedule

    @functools.cached_property
    def makespan(self) -> float:
        """End of the last action of all; the first starts at 0."""
        return max(row[-1].end for row in self.events)

    @functools.cached_property
    def work(self) -> tuple[float, ...]:
        """Time that each rank computes."""
        return tuple(math.fsum(event.end - event.start for event in row) for row in self.events)

    @property
    def ideal(self) -> float:
        """Work of the busiest rank: no order can be faster. With equal stages, the work of any rank."""
        return max(self.work)

    @property
    def idle(self) -> tuple[float, ...]:
        """Time of the makespan in which each rank does not compute."""
        return tuple(self.makespan - work for work in self.work)

    @property
    def bubble(self) -> float:
        """Longest time from the first action of a rank to its last, less `ideal`.

        Taken over a rank's own span, as the zero-bubble paper does (its cost is the longest time of any stage): ranks
        that end early go on to the next batch early. Where rank 0 starts first and ends last, as in GPipe, 1F1B,
        interleaved 1F1B and ZB-H1, it is makespan − ideal.
        """
        return max(row[-1].end - row[0].start for row in self.events) - self.ideal

    @property
    def bubble_fraction(self) -> float:
        """`bubble` over `ideal`: (p−1)/m for 1F1B (Narayanan et al., SC 2021, section 2.2)."""
        return self.bubble / self.ideal if self.ideal else 0.0

    @functools.cached_property
    def peak_inflight(self) -> tuple[float, ...]:
        """Most activations that each rank holds, in microbatches of the whole rank.

        One chunk of a rank with v stages is 1/v of a microbatch. It is held from the start of its F to the end of its
        B, or of its W: the weight gradient needs it too.
        """
        return tuple(
            max(held for _, held in self.memory(rank)) / len(self.schedule.stages_of(rank))
            for rank in range(self.schedule.num_ranks)
        )

    def memory(self, rank: int) -> list[tuple[float, int]]:
        """Chunk activations that `rank` holds over time: each time at which the number changes, and the number after.

        What ends at a time is given back before what starts at that time is taken, so the number at a time is the last
        one listed for it or before it.
        """
        curve, held = [], 0
        for action, start, end in self.events[rank]:  # one at a time, so in order of time
            if action.kind is Kind.F:
                held += 1
                curve.append((start, held))
            elif action.kind is not Kind.I:
                held -= 1
                curve.append((end, held))
        return curve


def free_running(schedule: Schedule, costs: Costs) -> Timeline:
    """Runs `schedule` with every action as early as its rank and what it needs allow.

    Args:
      schedule: a legal schedule.
      costs: times of the actions and hops; B takes as long as I and W together.

    Returns:
      The timeline, in the unit of `costs`. Takes time linear in the number of actions.

    Raises:
      ScheduleError: when `costs` do not fit the stages, or the schedule cannot be run to its end.
    """
    times = costs.per_stage(schedule.num_stages)
    durations = {Kind.F: times["forward"], Kind.I: times["backward_input"], Kind.W: times["backward_weight"]}
    durations[Kind.B] = tuple(map(sum, zip(durations[Kind.I], durations[Kind.W], strict=True)))
    ended: dict[Action, float] = {}
    free = [0.0] * schedule.num_ranks
    events: list[list[Event]] = [[] for _ in range(schedule.num_ranks)]
    for rank, action in execution_order(schedule):
        start = free[rank]
        for need in action.needs(schedule.num_stages):
            hop = times["hop"][need.stage] if schedule.placement[need.stage] != rank else 0.0
            start = max(start, ended[need] + hop)
        end = start + durations[action.kind][action.stage]
        free[rank] = ended[action.product] = end
        events[rank].append(Event(action, start, end))
    if any(len(row) < len(order) for row, order in zip(events, schedule.actions, strict=True)):
        validate(schedule)  # shows where it stalls
    return Timeline(schedule, tuple(map(tuple, events)))
