"""What a schedule is asked for, and how good a schedule is.

Invariant: whatever found a schedule, only the clocks and the memory of `fiddlex.simulate` judge it.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import numpy as np

from fiddlex.errors import ScheduleError
from fiddlex.schedules.columns import KIND_NUMBERS, Columns
from fiddlex.schedules.schedule import Kind, Schedule, execution_order
from fiddlex.schedules.ticks import SLOT_OF, fills_pairs, place
from fiddlex.schedules.validate import validate
from fiddlex.simulate.clock import MOST, Costs, free_running
from fiddlex.simulate.lockstep import TickWork

CLOCKS = ("lockstep", "free_running")
MOST_ACTIONS = 2**20  # of a schedule that is searched; each candidate of that size takes ten seconds or so
ROUNDING = 1e-9  # relative; sums of the same times in another order differ by less


class Judged(NamedTuple):
    """How good a schedule is."""

    # lockstep: makespan; free-running: longest time from a rank's first action to its last. Both: most work plus bubble
    time: float
    makespan: float  # from the first action to the last
    peaks: tuple[float, ...]  # the most that each rank holds, in the unit of `Problem.activation`

    def better_than(self, other: "Judged | None") -> bool:
        """Whether the time is shorter by more than rounding, or equal and the makespan shorter."""
        if other is None:
            return True
        if abs(self.time - other.time) > ROUNDING * other.time:
            return self.time < other.time
        return self.makespan < other.makespan * (1 - ROUNDING)


def check_size(num_stages: int, num_microbatches: int) -> None:
    if (number := 3 * num_stages * num_microbatches) > MOST_ACTIONS:
        raise ScheduleError(
            f"{num_stages:,} stages and {num_microbatches:,} microbatches make {number:,} actions; schedules are "
            f"searched up to {MOST_ACTIONS:,}. Use fewer ranks, chunks or microbatches, or a schedule that has a name."
        )


@dataclasses.dataclass(frozen=True)
class Problem:
    """A pipeline whose schedule is to be found."""

    placement: tuple[int, ...]  # the rank of each stage
    num_microbatches: int  # microbatches in a batch, which is flushed
    costs: Costs  # the times of actions and messages; F, I and W of all stages above 0
    caps: tuple[float, ...]  # the most that each rank may hold, in the unit of `activation`
    # what one microbatch of each stage takes from the start of its F to the end of its B or W
    activation: tuple[float, ...]
    weight_gradient: tuple[float, ...]  # what an I of each stage leaves for its W
    clock: str = "lockstep"  # the clock whose time counts: `lockstep` or `free_running`

    def __post_init__(self) -> None:
        if self.clock not in CLOCKS:
            raise ScheduleError(f"clock={self.clock!r} is not one of {', '.join(CLOCKS)}.")
        if self.num_microbatches < 1:
            raise ScheduleError(f"microbatches={self.num_microbatches} must be at least 1.")
        check_size(self.num_stages, self.num_microbatches)
        durations = self.costs.durations(self.num_stages)
        for kind in (Kind.F, Kind.I, Kind.W):
            for stage, time in enumerate(durations[kind]):
                if not 0 < time <= MOST:
                    raise ScheduleError(
                        f"costs: {kind} of stage {stage} takes {time:g}; a search needs times above 0. Give every "
                        "stage's forward, backward_input and backward_weight."
                    )
        for rank, (cap, least) in enumerate(zip(self.caps, self.least, strict=True)):
            if not cap >= least * (1 - ROUNDING):
                raise ScheduleError(
                    f"a cap of {cap:g} on rank {rank} is below {least:g}: a microbatch goes through all stages of a "
                    f"rank before any of them can let go of it. Give a cap of {least:g} or more."
                )

    @classmethod
    def in_microbatches(
        cls,
        placement: tuple[int, ...],
        num_microbatches: int,
        costs: Costs,
        cap: float = math.inf,
        clock: str = "lockstep",
    ) -> "Problem":
        """A problem whose cap counts microbatches of the whole rank, as `Timeline.peak_inflight` does.

        Raises:
          ScheduleError: when the costs do not fit the stages, a time is not above 0, or no schedule fits the cap.
        """
        share = [1 / placement.count(rank) for rank in placement]
        zero = (0.0,) * len(placement)
        return cls(placement, num_microbatches, costs, (cap,) * (1 + max(placement)), tuple(share), zero, clock)

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    @property
    def num_ranks(self) -> int:
        return 1 + max(self.placement)

    @functools.cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank, in order."""
        return tuple(
            tuple(stage for stage, home in enumerate(self.placement) if home == rank) for rank in range(self.num_ranks)
        )

    @functools.cached_property
    def least(self) -> tuple[float, ...]:
        """The least that each rank holds under any schedule: one microbatch of all its stages."""
        return tuple(sum(self.activation[stage] for stage in stages) for stages in self.stages_of)

    @functools.cached_property
    def later(self) -> tuple[float, ...]:
        """What one microbatch of the later stages on the rank of each stage takes."""
        later = [0.0] * self.num_stages
        for stages in self.stages_of:
            for stage, after in zip(reversed(stages[:-1]), reversed(stages[1:]), strict=True):
                later[stage] = later[after] + self.activation[after]
        return tuple(later)

    @functools.cached_property
    def durations(self) -> dict[Kind, tuple[float, ...]]:
        """The time of each kind of action on each stage, without embedding and head."""
        return self.costs.durations(self.num_stages)

    @functools.cached_property
    def times(self) -> dict[Kind, tuple[float, ...]]:
        """The time of each kind of action on each stage; free-running: embedding and head included."""
        durations, costs = dict(self.durations), self.costs
        if self.clock == "free_running":
            # In the free-running clock the first and the last stage embed and score. In lockstep all ranks do so
            # together, which is not counted here.
            forward, inputs, whole = (list(durations[kind]) for kind in (Kind.F, Kind.I, Kind.B))
            forward[0] += costs.embed
            forward[-1] += costs.head
            inputs[0] += costs.embed_backward
            whole[0] += costs.embed_backward
            durations |= {Kind.F: tuple(forward), Kind.I: tuple(inputs), Kind.B: tuple(whole)}
        return durations

    def judge(self, schedule: Schedule) -> Judged | None:
        """How good a legal schedule is; None if a rank holds more than its cap.

        Raises:
          ScheduleError: when the schedule cannot run to its end.
        """
        if self.clock == "free_running":
            timeline = free_running(schedule, self.costs)
            columns = Columns.of(schedule, tuple(tuple(range(len(row))) for row in schedule.actions))
            judged = Judged(timeline.ideal + timeline.bubble, timeline.makespan, self._peaks(columns))
        else:
            # Ticks on which forwards run ahead would hide ranks that wait for each other.
            if fills_pairs(schedule) and sum(1 for _ in execution_order(schedule)) < len(schedule.numbered):
                validate(schedule)  # shows where they wait
            columns = Columns.of(schedule, place(schedule))
            num_ticks = 1 + int(columns.tick.max())
            makespan = TickWork.of(schedule, columns, num_ticks=num_ticks, spills=False).times(self.costs).makespan
            judged = Judged(makespan, makespan, self._peaks(columns))
        within = all(peak <= cap * (1 + ROUNDING) for peak, cap in zip(judged.peaks, self.caps, strict=True))
        return judged if within else None

    def _peaks(self, columns: Columns) -> tuple[float, ...]:
        """The most that each rank holds, given the tick of each action or its position on its rank."""
        activation, weight = np.asarray(self.activation), np.asarray(self.weight_gradient)
        f, b, i, w = (columns.kind == KIND_NUMBERS[kind] for kind in (Kind.F, Kind.B, Kind.I, Kind.W))
        held, left = activation[columns.stage], weight[columns.stage]
        change = np.select([f, b, i, w], [held, -held, left, -held - left])
        slots = np.asarray([SLOT_OF[kind] for kind in KIND_NUMBERS])[columns.kind]
        order = np.lexsort((slots, columns.tick, columns.rank))
        total = np.cumsum(change[order])
        rank = columns.rank[order]
        ends = np.searchsorted(rank, np.arange(self.num_ranks + 1))
        before = np.concatenate([[0.0], total])[ends[:-1]]
        most = np.maximum.reduceat(total, ends[:-1]) - before
        return tuple(np.maximum(most, 0.0).tolist())
