"""Schedules that repeat one block, the actions of a microbatch on all ranks, every so many units of time.

`fiddlex.schedules.repeated_blocks` says what a block is. The time for which its actions last on a rank gives the rank's
memory. All actions take one unit here, as in ticks.
"""

import itertools
import math
from collections.abc import Iterator

import numpy as np
from scipy import optimize, sparse

from fiddlex.schedules import repeated_blocks
from fiddlex.schedules.repeated_blocks import Block
from fiddlex.schedules.schedule import Action, Kind, Schedule
from fiddlex.synthesis.problem import ROUNDING, Problem

_KINDS = (Kind.F, Kind.I, Kind.W)
PACES = (1, 2, 3, 4)  # units from one rank's action of a pass to the next one's
MOST_REGULAR = 256  # blocks that `regular` lists at most
MOST_BINARIES = 500  # in the integer program: actions of a block times units of its period
MOST_NODES = 300  # that the integer program may look at for a period; a number, so that all machines find the same


def repeated(problem: Problem, block: Block, name: str = "auto") -> Schedule:
    return repeated_blocks.repeated(
        name, problem.placement, block, problem.num_microbatches, room=problem.caps, amounts=problem.activation
    )


def regular(problem: Problem) -> Iterator[Block]:
    """Blocks whose passes go on at an even pace, with the fewest waits between passes in which no actions meet."""
    passes = repeated_blocks.passes_of(problem.placement)
    paces: Iterator[tuple[int, ...]] = itertools.product(PACES, repeat=len(passes))
    if len(PACES) ** len(passes) > MOST_REGULAR:  # passes of F have two paces in turn, and those of I have two
        half = len(passes) // 2
        paces = ((*(f[i % 2] for i in range(half)), *(b[i % 2] for i in range(half))) for f, b in _pairs_of_paces())
    for each in paces:
        block = repeated_blocks.even_block(problem.placement, each)
        if block is not None:
            yield block


def _pairs_of_paces() -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    two = list(itertools.product(PACES, repeat=2))
    return itertools.product(two, two)


def solved(problem: Problem) -> tuple[Block | None, int]:
    """A block with the shortest period that the caps allow, and of those one that ends soonest; costs are not used.

    The block is None if none was found within the limits on size and nodes. The number is a lower bound of the period,
    in units.
    """
    proven = least = _least_period(problem)
    longest = max(least, 2 * problem.num_stages + 1)  # a microbatch ends as the next begins
    for period in range(least, longest + 1):
        if 3 * problem.num_stages * period > MOST_BINARIES:
            break
        block, infeasible = _BlockProgram(problem, period).solve()
        if block is not None:
            return block, proven
        if infeasible and proven == period:
            proven = period + 1
    return None, proven


def _least_period(problem: Problem) -> int:
    """Units that a rank works for a microbatch, or in which it can let go of what a microbatch holds there."""
    least = 3 * max(map(len, problem.stages_of))
    for rank, stages in enumerate(problem.stages_of):
        lasts = (problem.activation[stage] * (2 * (problem.num_stages - stage) + 1) for stage in stages)
        least = max(least, math.ceil(sum(lasts) / problem.caps[rank] * (1 - ROUNDING)))
    return least


class _BlockProgram:
    """The integer program of a period: for each action a unit of the period and a number of whole periods before it."""

    def __init__(self, problem: Problem, period: int):
        self.problem, self.period = problem, period
        self._actions = list(itertools.product(range(problem.num_stages), _KINDS))
        self._index = {action: i for i, action in enumerate(self._actions)}
        self._width = period + 1  # variables of an action: one for each unit, then the whole periods
        self._count = len(self._actions) * self._width
        self._rows: list[tuple[dict[int, float], float, float]] = []

    def solve(self) -> tuple[Block | None, bool]:
        """A block that ends soonest, or None and whether there is none."""
        self._choose_units()
        self._follow()
        self._fit_memory()
        data = [(i, column, value) for i, (row, _, _) in enumerate(self._rows) for column, value in row.items()]
        rows, columns, values = map(np.asarray, zip(*data, strict=True))
        matrix = sparse.csr_matrix((values, (rows, columns)), shape=(len(self._rows), self._count))
        low, high = (np.asarray([row[i] for row in self._rows]) for i in (1, 2))
        upper = np.ones(self._count)
        upper[self.period :: self._width] = 4 * self.problem.num_stages
        cost = np.zeros(self._count)
        for column, value in self._start((0, Kind.I)).items():
            cost[column] = value
        for action in self._actions:
            for column, value in self._start(action).items():
                cost[column] += value / (10.0 * len(self._actions))
        result = optimize.milp(
            cost,
            constraints=optimize.LinearConstraint(matrix, low, high),
            bounds=optimize.Bounds(np.zeros(self._count), upper),
            integrality=np.ones(self._count),
            options={"node_limit": MOST_NODES},
        )
        if result.x is None:
            return None, result.status == 2
        starts = {
            action: round(sum(value * result.x[column] for column, value in self._start(action).items()))
            for action in self._actions
            if action[1] is not Kind.W
        }
        first = starts[0, Kind.F]
        return Block({key: start - first for key, start in starts.items()}, self.period), False

    def _start(self, action: tuple[int, Kind]) -> dict[int, float]:
        begin = self._index[action] * self._width
        return {begin + unit: float(unit) for unit in range(1, self.period)} | {begin + self.period: float(self.period)}

    def _choose_units(self) -> None:
        """Each action has one unit of the period, and no two actions of a rank have the same."""
        for i in range(len(self._actions)):
            self._rows.append(({i * self._width + unit: 1.0 for unit in range(self.period)}, 1.0, 1.0))
        for stages in self.problem.stages_of:
            for unit in range(self.period):
                own = (self._index[stage, kind] for stage in stages for kind in _KINDS)
                self._rows.append(({i * self._width + unit: 1.0 for i in own}, 0.0, 1.0))

    def _follow(self) -> None:
        """Each action begins one unit after what it needs, or later."""
        for stage, kind in self._actions:
            for need_stage, need_kind, _ in Action(stage, kind, 0).needs(self.problem.num_stages):
                row = self._start((stage, kind))
                for column, value in self._start((need_stage, need_kind)).items():
                    row[column] = row.get(column, 0.0) - value
                self._rows.append((row, 1.0, math.inf))

    def _fit_memory(self) -> None:
        """At the start of each unit no rank holds more than its cap."""
        problem = self.problem
        for rank, stages in enumerate(problem.stages_of):
            if problem.caps[rank] == math.inf:
                continue
            for unit in range(self.period):
                row: dict[int, float] = {}
                for stage in stages:
                    # As shares of the cap, since the solver's tolerances are absolute.
                    held, left = (
                        row_of[stage] / problem.caps[rank] for row_of in (problem.activation, problem.weight_gradient)
                    )
                    for kind, amount in ((Kind.F, held), (Kind.I, left), (Kind.W, -held - left)):
                        # Begun by now in this period, besides whole periods: a W lets go one unit after its start.
                        begin = self._index[stage, kind] * self._width
                        until = unit + 1 if kind is not Kind.W else unit
                        for each in range(until):
                            row[begin + each] = row.get(begin + each, 0.0) + amount
                        row[begin + self.period] = row.get(begin + self.period, 0.0) - amount
                self._rows.append((row, -math.inf, 1 + ROUNDING))
