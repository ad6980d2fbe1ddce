"""Builds a whole schedule by running it: every rank takes the best action that is ready, under limits (`Rules`).

Each rank chooses for itself; `beam` lets ranks choose together for each tick of the lockstep clock.

An F waits where memory would exceed its cap less what one I leaves for its W, and an I waits where what it leaves would
exceed the cap, until the rank has run a W.

No rank waits for ever. Once a microbatch has run the F of all stages of a rank, it needs no more room there, and what
it holds is sure to be let go of. An F also waits if the microbatches that are not so far would then leave no room for
the later F of its own microbatch. So there is always room for one of those, and all the more for the earliest of them,
which needs least. The earliest microbatch of all that has not ended waits for no other, so it goes on, and so does the
next when it has ended. Invariant: the result is a legal schedule, and within the caps if backward passes are whole, or
if a microbatch of all stages of a rank and what one I leaves fit together.
"""

import heapq
import math
from typing import NamedTuple

from fiddlex.schedules.schedule import Action, Kind, Schedule
from fiddlex.simulate.clock import Costs
from fiddlex.synthesis.problem import ROUNDING, Problem


class Rules(NamedTuple):
    """How ranks choose."""

    ahead: tuple[float, ...]  # for each stage, the most microbatches whose F has begun and whose I or B has not
    splits: bool = True  # whether backward passes are I and W, or B
    forward_first: bool = False  # whether an F goes before an I or B that is ready too
    # whether, of several F or several I, the one furthest along its pass goes first, or that of the earliest microbatch
    deep_first: bool = True
    # whether an F waits for room for the later stages of its rank too, or only as long as it must
    reserves: bool = False
    patience: float = 0.0  # a rank that waits for an F or I runs a W only if the wait is at least this share of the W
    # whether all actions take one unit while the schedule is built, as ticks do, instead of their times
    unit: bool = False


def round_trips(problem: Problem) -> tuple[float, ...]:
    """For each stage, how many microbatches are in flight from its F to its backward pass if no rank ever waits.

    It is the time of the passes through the stages that follow and back, divided by the work of the busiest rank.
    """
    inputs, forwards = problem.times[Kind.I], problem.times[Kind.F]
    hops = problem.costs.per_stage(problem.num_stages)["hop"]
    work = [sum(problem.times[Kind.B][s] + forwards[s] for s in stages) for stages in problem.stages_of]
    trips, trip = [0.0] * problem.num_stages, 0.0
    for stage in reversed(range(problem.num_stages)):
        trip += forwards[stage] + inputs[stage]
        if stage + 1 < problem.num_stages and problem.placement[stage] != problem.placement[stage + 1]:
            trip += hops[stage] + hops[stage + 1]
        trips[stage] = trip / max(work)
    return tuple(trips)


def limits(problem: Problem, ahead: float) -> tuple[float, ...]:
    """`Rules.ahead` that lets in `ahead` microbatches beyond a round trip of each stage; infinity: no limits."""
    return tuple(max(1, math.ceil(trip - 1e-9)) + ahead for trip in round_trips(problem))


def room_for_forwards(problem: Problem, *, splits: bool) -> list[float]:
    """For each rank, the most that it may hold when an F has begun: if it can, it keeps room for what an I leaves."""
    rooms = [cap * (1 + ROUNDING) for cap in problem.caps]
    for rank, own in enumerate(problem.stages_of):
        room = rooms[rank] - max(problem.weight_gradient[stage] for stage in own)
        if splits and room >= problem.least[rank]:
            rooms[rank] = room
    return rooms


def build(problem: Problem, rules: Rules, name: str = "auto") -> Schedule:
    run = _Run(problem, rules)
    run.run()
    return run.schedule(name)


class _Run:
    """The state of all ranks at one time."""

    def __init__(self, problem: Problem, rules: Rules):
        self.problem, self.rules = problem, rules
        costs = Costs() if rules.unit else problem.costs
        self._durations = costs.durations(problem.num_stages) if rules.unit else problem.times
        self._hops = costs.per_stage(problem.num_stages)["hop"]
        backward = Kind.I if rules.splits else Kind.B
        self._kinds = (Kind.F, backward, Kind.W) if rules.splits else (Kind.F, backward)
        stages, m = range(problem.num_stages), problem.num_microbatches
        self._begun = {kind: [0] * problem.num_stages for kind in Kind}  # the microbatches of a stage run in order
        self._arrival = {  # when what an action needs from another action is there; m + 1, since none has number m
            kind: [[math.inf] * (m + 1) for _ in stages] for kind in self._kinds
        }
        self._arrival[Kind.F][0] = [0.0] * m + [math.inf]
        self._rows: list[list[Action]] = [[] for _ in range(problem.num_ranks)]
        self._held = [0.0] * problem.num_ranks  # what each rank holds
        self._unsure = [0.0] * problem.num_ranks  # the part of it that needs more room before it is let go of
        self._waiting = [0] * problem.num_ranks  # I whose W has not begun
        self._left = problem.weight_gradient
        self._caps = [cap * (1 + ROUNDING) for cap in problem.caps]
        self._room = room_for_forwards(problem, splits=rules.splits)
        self._later = problem.later
        self._backward = backward

    def schedule(self, name: str) -> Schedule:
        return Schedule(name, tuple(map(tuple, self._rows)), self.problem.placement, strict=not self.rules.splits)

    def run(self) -> None:
        free = [0.0] * self.problem.num_ranks
        wakes = [(0.0, rank) for rank in range(self.problem.num_ranks)]
        while wakes:
            now, rank = heapq.heappop(wakes)
            while wakes and wakes[0] == (now, rank):
                heapq.heappop(wakes)
            if free[rank] > now:
                continue
            chosen = self._choose(rank, now)
            if chosen is None:
                continue
            stage, kind = chosen
            free[rank] = end = now + self._durations[kind][stage]
            heapq.heappush(wakes, (end, rank))
            for time, other in self._run(rank, stage, kind, end):
                heapq.heappush(wakes, (time, other))

    def _choose(self, rank: int, now: float) -> tuple[int, Kind] | None:
        forward, forward_at = self._next(rank, Kind.F, now)
        backward, backward_at = self._next(rank, self._backward, now)
        order = [(forward, forward_at, Kind.F), (backward, backward_at, self._backward)]
        for stage, at, kind in order if self.rules.forward_first else reversed(order):
            if stage is not None and at <= now:
                return stage, kind
        if not self.rules.splits:
            return None
        weight, _ = self._next(rank, Kind.W, now)
        if weight is None:
            return None
        wait = min(forward_at, backward_at) - now
        if wait < self.rules.patience * self._durations[Kind.W][weight]:
            return None
        return weight, Kind.W

    def _next(self, rank: int, kind: Kind, now: float) -> tuple[int | None, float]:
        """The stage whose action of a kind may begin first, and when: the best of those that are ready now."""
        best: tuple[float, tuple[int, int], int] | None = None
        begun, arrival = self._begun[kind], self._arrival[kind]
        for stage in self.problem.stages_of[rank]:
            microbatch = begun[stage]
            at = arrival[stage][microbatch]
            if at == math.inf or not self._may_begin(rank, stage, kind):
                continue
            depth = -stage if kind is Kind.F else stage
            key = (depth, microbatch) if self.rules.deep_first else (microbatch, depth)
            candidate = (max(at, now), key, stage)
            if best is None or candidate < best:
                best = candidate
        return (best[2], best[0]) if best else (None, math.inf)

    def _may_begin(self, rank: int, stage: int, kind: Kind) -> bool:
        if kind is Kind.I:
            return self._held[rank] + self._left[stage] <= self._caps[rank] or not self._waiting[rank]
        if kind is not Kind.F:
            return True
        ahead = self._begun[Kind.F][stage] - self._begun[self._backward][stage]
        if ahead >= self.rules.ahead[stage]:
            return False
        more, cap, later = self.problem.activation[stage], self._room[rank], self._later[stage]
        if self.rules.reserves:
            return self._held[rank] + more + later <= cap
        return self._held[rank] + more <= cap and self._unsure[rank] + more + later <= cap

    def _run(self, rank: int, stage: int, kind: Kind, end: float) -> list[tuple[float, int]]:
        """Runs the next action of a kind; returns when which ranks can use what it makes."""
        problem = self.problem
        microbatch = self._begun[kind][stage]
        self._begun[kind][stage] += 1
        self._rows[rank].append(Action(stage, kind, microbatch))
        if kind is Kind.F:
            self._held[rank] += problem.activation[stage]
            self._unsure[rank] += problem.activation[stage]
            if stage == problem.stages_of[rank][-1]:
                self._unsure[rank] -= problem.least[rank]
        elif kind is Kind.I:
            self._held[rank] += self._left[stage]
            self._waiting[rank] += 1
        else:
            self._held[rank] -= problem.activation[stage]
            if kind is Kind.W:
                self._held[rank] -= self._left[stage]
                self._waiting[rank] -= 1
        if kind is Kind.W:
            return []
        if kind is Kind.I:
            self._arrival[Kind.W][stage][microbatch] = end
        last = problem.num_stages - 1
        if kind is Kind.F:
            target, product = (stage + 1, Kind.F) if stage < last else (stage, self._backward)
        elif stage:
            target, product = stage - 1, self._backward
        else:
            return []
        other = problem.placement[target]
        time = end + (self._hops[stage] if other != rank else 0.0)
        self._arrival[product][target][microbatch] = time
        return [(time, other)]
