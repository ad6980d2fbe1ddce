"""Times that no schedule can beat, under the caps on memory, for each rank by itself.

The bound is the least time in which one rank can run F, I and W of all its stages for all microbatches, one at a time.
What it needs of other ranks comes no sooner than the passes through their stages take if these never wait. All
microbatches are alike, so only the numbers of actions begun by each time matter, and a linear program over these
numbers, which may be fractions, is enough for a bound. Times are rounded down to a grid, so that they are whole
numbers. A B is an I and a W, one right after the other; between them it leaves nothing, so what an I leaves counts only
while its W waits. In lockstep ranks can only be later than in this model. Invariant: no legal schedule within the caps
takes less than `lower_bound`.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import optimize, sparse

from fiddlex.schedules.schedule import Kind
from fiddlex.synthesis.problem import ROUNDING, Problem

GRID_STEPS = 6  # steps of the grid in the shortest action, if times are no multiples of a common one
GRIDS = 64  # steps that are compared then
MOST_PARTS = 12  # of the shortest action, into which a common step may part it
TOLERANCE = 3e-3  # relative; by at most so much the bound is below what a rank's program on a grid gives
CELLS = (2500, 5000)  # variables of a rank's linear program (three curves for each stage × steps): coarse, fine grid
FIRST_STRIDE = 0.01  # relative; a time that is too short is lengthened by so much, then by twice as much, and so on

_KINDS = (Kind.F, Kind.I, Kind.W)


def lower_bound(problem: Problem, known: float = math.inf) -> float:
    """A time that no schedule within the caps beats, as `Judged.time`; at most `known`, a schedule's time."""
    best = _of_cores(problem)
    for times, shared in _relaxations(problem):
        best = max(best, _bound(times, problem, best - shared, known - shared) + shared)
    return min(best, known)


class Times(NamedTuple):
    """Times of a relaxation."""

    durations: dict[Kind, tuple[float, ...]]  # of each kind on each stage
    hops: tuple[float, ...]  # the time of a message from each stage to another rank


def _relaxations(problem: Problem) -> list[tuple[Times, float]]:
    """Times that a schedule can only exceed, each with what all ranks spend together besides them."""
    costs, stages = problem.costs, problem.num_stages
    durations, hops = problem.durations, costs.per_stage(stages)["hop"]
    if problem.clock == "free_running":
        return [(Times(problem.times, hops), 0.0)]
    if costs.sharing:  # whatever runs beside an action, it takes at least so many times as long
        least = min(costs.sharing[: problem.num_ranks])
        durations = {kind: tuple(least * time for time in row) for kind, row in durations.items()}
    shared = _shared(problem)
    with_hops, without = Times(durations, hops), Times(durations, (0.0,) * stages)
    # In lockstep all ranks embed and score together, and every tick adds a time; without these times, hops are left out
    # too, since they may be hidden by them.
    return [(without, shared), (with_hops, 0.0)] if shared or any(hops) else [(without, 0.0)]


def _shared(problem: Problem) -> float:
    """Time in which all ranks embed and score together, and that ticks add, in lockstep."""
    costs, most = problem.costs, max(map(len, problem.stages_of))
    # A rank runs at most one F in a tick.
    return problem.num_microbatches * (costs.embed + costs.head + costs.embed_backward + most * costs.tick)


def _of_cores(problem: Problem) -> float:
    """The time of all work in lockstep on shared cores if as many ranks are always active as get most done."""
    sharing = problem.costs.sharing[: problem.num_ranks]
    if problem.clock != "lockstep" or not sharing:
        return 0.0
    work = problem.num_microbatches * sum(sum(problem.durations[kind]) for kind in _KINDS)
    return work / max(active / factor for active, factor in enumerate(sharing, start=1)) + _shared(problem)


def _bound(times: Times, problem: Problem, least: float, known: float) -> float:
    """The longest of the least times of the ranks, if it is more than `least`, up to `known`."""
    work = [sum(times.durations[kind][s] for kind in _KINDS for s in stages) for stages in problem.stages_of]
    best = max(least, problem.num_microbatches * max(work))
    ends = problem.clock == "lockstep"
    if ends:  # the first F of a rank comes after those of the stages before, and other ranks run after its last I
        for rank, stages in enumerate(problem.stages_of):
            best = max(best, _head(times, problem, stages[0]) + problem.num_microbatches * work[rank])
    best = max(best, _of_others(times, problem))
    for rank in range(problem.num_ranks):
        best = max(best, problem.num_microbatches * _held(times, problem, rank) / problem.caps[rank])
    return _of_ranks(times, problem, _examined(problem, work), best, known)


def _of_ranks(times: Times, problem: Problem, ranks: Sequence[int], best: float, known: float) -> float:
    """A time that one of `ranks` needs at least, if it is more than `best`, up to `known`.

    It is the longest on a coarse grid, or on a fine grid the time of the rank with the longest: each program takes a
    while.
    """
    shortest = min(min(times.durations[kind]) for kind in _KINDS)
    before = math.inf
    for cells in CELLS:
        coarse = 3 * max(map(len, problem.stages_of)) * best / cells
        step = _grid(times, problem, max(shortest / GRID_STEPS, coarse))
        if step > shortest or step >= before:  # too coarse to say anything, or to say more
            continue
        before, longest = step, None
        for rank in ranks:
            if best >= known * (1 - ROUNDING):
                return best
            time = _of_rank(times, problem, rank, step, best, known)
            if time > best:
                best, longest = time, rank
        if longest is not None:
            ranks = [longest]
    return best


def _examined(problem: Problem, work: Sequence[float]) -> list[int]:
    """The ranks whose programs are solved: first and last (longest round trips), middle, and the one with most work."""
    last = problem.num_ranks - 1
    return list(dict.fromkeys([0, last, last // 2, max(range(last + 1), key=lambda rank: work[rank])]))


def _grid(times: Times, problem: Problem, least: float) -> float:
    """A step of at least `least` of which times are multiples, or else the one at which rounding down loses least."""
    actions = np.stack([times.durations[kind] for kind in _KINDS])
    values = np.unique([*actions.ravel(), *(hop for hop in times.hops if hop)])
    parts = np.arange(1, MOST_PARTS + 1)
    steps = values[0] / parts
    multiples = values / steps[:, None]
    exact = (np.abs(multiples - np.round(multiples)) < ROUNDING * multiples).all(axis=1)
    if (steps[exact] >= least * (1 - ROUNDING)).any():
        return float(steps[exact][0])
    steps = np.linspace(least, 1.5 * least, GRIDS)
    rounded = np.floor(actions / steps[:, None, None] * (1 + ROUNDING)) * steps[:, None, None]
    work = np.stack([rounded[..., list(stages)].sum(axis=(1, 2)) for stages in problem.stages_of])  # [rank, step]
    whole = np.asarray([actions[:, list(stages)].sum() for stages in problem.stages_of])
    return float(steps[np.argmax(work[np.argmax(whole)])])


def _path(times: Times, problem: Problem, kind: Kind, stages: Sequence[int]) -> float:
    """Time from the start of the first of consecutive stages' actions to the arrival at the stage after the last."""
    total, step = 0.0, 1 if kind is Kind.F else -1
    for stage in stages:
        total += times.durations[kind][stage]
        after = stage + step
        if 0 <= after < problem.num_stages and problem.placement[after] != problem.placement[stage]:
            total += times.hops[stage]
    return total


def _held(times: Times, problem: Problem, rank: int) -> float:
    """Amount × time that a microbatch takes of the memory of a rank, at least."""
    total, last = 0.0, problem.num_stages - 1
    for stage in problem.stages_of[rank]:
        trip = _path(times, problem, Kind.F, range(stage, last + 1))
        trip += _path(times, problem, Kind.I, range(last, stage, -1))
        lasts = trip + times.durations[Kind.I][stage] + times.durations[Kind.W][stage]
        total += problem.activation[stage] * lasts
    return total


def _head(times: Times, problem: Problem, stage: int) -> float:
    return _path(times, problem, Kind.F, range(stage))


def _of_others(times: Times, problem: Problem) -> float:
    """The longest time that a rank needs because another one runs all its F and I between the rank's F and I.

    The other rank begins after the passes from the rank's first stage to its own, and when it has run its last I, that
    microbatch has to come back, and to run a W.
    """
    durations, longest = times.durations, 0.0
    for own in problem.stages_of:
        for others in problem.stages_of:
            if own[0] < others[0]:
                work = sum(durations[kind][stage] for kind in (Kind.F, Kind.I) for stage in others)
                there = _path(times, problem, Kind.F, range(own[0], others[0]))
                back = _path(times, problem, Kind.I, range(others[0], own[0], -1)) - durations[Kind.I][others[0]]
                last = durations[Kind.I][own[0]] + durations[Kind.W][own[0]]
                longest = max(longest, there + problem.num_microbatches * work + back + last)
    return longest


def _of_rank(times: Times, problem: Problem, rank: int, step: float, least: float, known: float) -> float:
    """The least time of a rank, if it is more than `least`, up to `known`: by strides, then halving the last."""
    program = _Program(times, problem, rank, step)
    low = math.ceil(least / step * (1 - ROUNDING))  # in steps: the rank needs at least this long
    if program.feasible(low):
        return least
    most = math.ceil(known / step * (1 - ROUNDING)) if known < math.inf else 2**62
    stride = max(1, math.ceil(FIRST_STRIDE * low))
    high = min(low + stride, most)
    while high < most and not program.feasible(high):
        stride *= 2
        low, high = high, min(high + stride, most)
    while high - low > max(1, TOLERANCE * low):
        middle = (low + high) // 2
        low, high = (low, middle) if program.feasible(middle) else (middle, high)
    return min((low + 1) * step, known)


class _Program:
    """The linear program of one rank; times are in steps of the grid."""

    def __init__(self, times: Times, problem: Problem, rank: int, step: float):
        def down(time: float) -> int:
            return math.floor(time / step * (1 + ROUNDING))

        def up(time: float) -> int:
            return math.ceil(time / step * (1 - ROUNDING))

        self._stages = stages = problem.stages_of[rank]
        self._number = problem.num_microbatches
        self._curves = {(stage, kind): i for i, (stage, kind) in enumerate((s, k) for s in stages for k in _KINDS)}
        self._length = {(stage, kind): down(times.durations[kind][stage]) for stage in stages for kind in _KINDS}
        # As shares of the cap, since the solver's tolerances are absolute.
        self._held, self._left = (
            {stage: row[stage] / problem.caps[rank] for stage in stages}
            for row in (problem.activation, problem.weight_gradient)
        )
        self._until_left = {stage: up(times.durations[Kind.I][stage]) for stage in stages}
        last = problem.num_stages - 1
        self._lags: list[tuple[tuple[int, Kind], tuple[int, Kind], int]] = []
        for stage, after in itertools.pairwise(stages):
            self._lag((stage, Kind.F), (after, Kind.F), down(_path(times, problem, Kind.F, range(stage, after))))
            self._lag((after, Kind.I), (stage, Kind.I), down(_path(times, problem, Kind.I, range(after, stage, -1))))
        turn = _path(times, problem, Kind.F, range(stages[-1], last + 1))
        turn += _path(times, problem, Kind.I, range(last, stages[-1], -1))
        self._lag((stages[-1], Kind.F), (stages[-1], Kind.I), down(turn))
        for stage in stages:
            self._lag((stage, Kind.I), (stage, Kind.W), self._length[stage, Kind.I])
        self._head = self._tails = None
        if problem.clock == "lockstep":
            self._head = down(_head(times, problem, stages[0]))
            end = times.durations[Kind.W][0]
            self._tails = {s: down(_path(times, problem, Kind.I, range(s, -1, -1)) + end) for s in stages}

    def _lag(self, first: tuple[int, Kind], second: tuple[int, Kind], lag: int) -> None:
        self._lags.append((first, second, lag))

    def feasible(self, horizon: int) -> bool:
        """Whether all actions can begin and end between 0 and `horizon`, in fractions."""
        rows = _Rows(len(self._curves), horizon)
        upper = np.full((len(self._curves), horizon), float(self._number))
        lower = np.zeros_like(upper)
        for key, curve in self._curves.items():
            end = horizon - self._length[key]
            if key[1] is Kind.I and self._tails is not None:
                end = min(end, horizon - self._tails[key[0]])
            if end < 0:
                return False
            lower[curve, end:] = self._number
        if self._head:
            upper[self._curves[self._stages[0], Kind.F], : self._head] = 0.0
        rows.monotonic()
        for first, second, lag in self._lags:
            rows.at_most([(self._curves[second], 0, 1.0), (self._curves[first], lag, -1.0)], 0.0)
        machine, memory = [], []
        for key, curve in self._curves.items():
            machine += [(curve, 0, 1.0), (curve, self._length[key], -1.0)]
        rows.at_most(machine, 1.0)
        for stage in self._stages:
            f, i, w = (self._curves[stage, kind] for kind in _KINDS)
            held, left = self._held[stage], self._left[stage]
            memory += [(f, 0, held), (w, self._length[stage, Kind.W], -held)]
            if left:
                memory += [(i, self._until_left[stage], left), (w, 0, -left)]
        if any(self._held.values()):
            rows.at_most(memory, 1 + ROUNDING)
            held, later = 0.0, sum(self._held.values())
            for stage, after in itertools.pairwise(self._stages):
                # Microbatches between two stages hold all stages so far, and one of them must have room for the others.
                held, later = held + self._held[stage], later - self._held[stage]
                if not held:
                    continue
                most = math.floor((1 - later) / held * (1 + ROUNDING) + ROUNDING)
                rows.at_most([(self._curves[stage, Kind.F], 0, 1.0), (self._curves[after, Kind.F], 0, -1.0)], most)
        result = optimize.linprog(
            np.zeros(upper.size),
            A_ub=rows.matrix(),
            b_ub=rows.limits(),
            bounds=np.stack([lower.ravel(), upper.ravel()], axis=1),
            method="highs-ipm",  # several times faster here than the simplex method
        )
        return result.status != 2  # 2: infeasible; anything else proves nothing


class _Rows:
    """Rows of a linear program over curves: how many actions have begun by each step."""

    def __init__(self, num_curves: int, horizon: int):
        self._num_curves, self._horizon = num_curves, horizon
        self._parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._limits: list[np.ndarray] = []
        self._count = 0

    def monotonic(self) -> None:
        for curve in range(self._num_curves):
            self.at_most([(curve, 1, 1.0), (curve, 0, -1.0)], 0.0)

    def at_most(self, terms: Sequence[tuple[int, int, float]], limit: float) -> None:
        """Adds for every step that the sum of factor × (curve as it was `lag` steps earlier) is at most `limit`."""
        steps = np.arange(self._horizon)
        for curve, lag, factor in terms:
            then = steps - lag
            there = then >= 0
            columns = curve * self._horizon + then[there]
            self._parts.append((self._count + steps[there], columns, np.full(len(columns), factor)))
        self._limits.append(np.full(self._horizon, limit))
        self._count += self._horizon

    def matrix(self) -> sparse.csr_matrix:
        rows, columns, values = (np.concatenate(parts) for parts in zip(*self._parts, strict=True))
        return sparse.csr_matrix((values, (rows, columns)), shape=(self._count, self._num_curves * self._horizon))

    def limits(self) -> np.ndarray:
        return np.concatenate(self._limits)
