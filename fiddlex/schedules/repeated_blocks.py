"""Schedules that repeat one block: the F and I of a microbatch on all ranks, every so many units of time.

Source: "Pipeline Parallelism with Controllable Memory" (Qi et al., NeurIPS 2024), section 3. All actions take one unit
here. A block gives a whole schedule if no two actions of a rank meet when it repeats. F and I keep the order of the
blocks, except where their rank would wait, as it does while the pipeline fills and drains. There a W runs, or, if there
is none, the first F or I that can. A W also runs where the rank's memory is full.
"""

import collections
from collections.abc import Sequence, Set
from typing import NamedTuple

from fiddlex.schedules.schedule import Action, Kind, Schedule

_MOST_WAIT = 6  # units for which a block waits at the end of a pass
_ROUNDING = 1e-9  # relative; sums of amounts differ by less


class Block(NamedTuple):
    """The start of each F and I of a microbatch, and the units after which the next microbatch follows."""

    starts: dict[tuple[int, Kind], int]  # (stage, F or I) → unit
    period: int  # units between two microbatches


def passes_of(placement: Sequence[int]) -> list[list[tuple[int, Kind]]]:
    """The F and then the I of a microbatch, cut where a rank comes up for the second time."""
    passes: list[list[tuple[int, Kind]]] = []
    for kind, stages in ((Kind.F, range(len(placement))), (Kind.I, reversed(range(len(placement))))):
        seen: set[int] = set()
        for number, stage in enumerate(stages):
            rank = placement[stage]
            if number == 0 or rank in seen:
                passes.append([])
                seen = set()
            seen.add(rank)
            passes[-1].append((stage, kind))
    return passes


def even_block(placement: Sequence[int], paces: Sequence[int], *, loss_wait: int = 0) -> Block | None:
    """A block whose passes go from rank to rank at an even pace, each as early as no two actions of a rank meet.

    Its period is the work of the rank with most stages. The block is None if a pass would wait too long.

    For each of `passes_of`, `paces` has the units from one rank's action to the next one's. `loss_wait` is the fewest
    units between the last F and the first I.
    """
    ranks = range(1 + max(placement))
    period = 3 * max(map(list(placement).count, ranks))
    starts: dict[tuple[int, Kind], int] = {}
    taken: list[set[int]] = [set() for _ in ranks]
    begin = 0
    for actions, pace in zip(passes_of(placement), paces, strict=True):
        own = [placement[stage] for stage, _ in actions]
        least = loss_wait if actions[0] == (len(placement) - 1, Kind.I) else 0
        for wait in range(least, least + _MOST_WAIT + 1):
            units = [begin + wait + pace * i for i in range(len(actions))]
            places = [(rank, unit % period) for rank, unit in zip(own, units, strict=True)]
            if all(unit not in taken[rank] for rank, unit in places):
                break
        else:
            return None
        for rank, unit in places:
            taken[rank].add(unit)
        starts.update(zip(actions, units, strict=True))
        begin = units[-1] + 1
    return Block(starts, period)


def repeated(
    name: str,
    placement: Sequence[int],
    block: Block,
    num_microbatches: int,
    *,
    room: Sequence[float],
    amounts: Sequence[float],
) -> Schedule:
    """Repeats a block for every microbatch; a rank holds no more than its `room` unless its F and I alone do.

    `amounts` is what one microbatch of each stage takes from its F to the end of its W.
    """
    rows: list[list[tuple[int, Action]]] = [[] for _ in room]
    for (stage, kind), start in block.starts.items():
        for k in range(num_microbatches):
            rows[placement[stage]].append((start + block.period * k, Action(stage, kind, k)))
    ordered = [[action for _, action in sorted(row)] for row in rows]
    return Schedule(name, _with_weights(ordered, placement, room=room, amounts=amounts), tuple(placement))


def _with_weights(
    rows: Sequence[Sequence[Action]], placement: Sequence[int], *, room: Sequence[float], amounts: Sequence[float]
) -> tuple[tuple[Action, ...], ...]:
    """Adds the W of every I to the F and I of each rank, and orders them as the module's docstring says."""
    ranks = [_Rank(row, most, amounts) for row, most in zip(rows, room, strict=True)]
    full: list[list[Action]] = [[] for _ in rows]
    done, awake = set[Action](), set(range(len(rows)))
    while any(rank.left or rank.weights for rank in ranks):
        ran = {rank: action for rank in awake if (action := ranks[rank].run(done))}
        assert ran, "the F and I can run to their end"
        for rank, action in ran.items():
            full[rank].append(action)
        done.update(ran.values())
        # A rank that waits can go on only when a stage beside one of its own has run.
        beside = (stage for action in ran.values() for stage in (action.stage - 1, action.stage + 1))
        awake = {*ran, *(placement[stage] for stage in beside if 0 <= stage < len(placement))}
    return tuple(map(tuple, full))


class _Rank:
    """What a rank has still to run, and what it holds."""

    def __init__(self, row: Sequence[Action], room: float, amounts: Sequence[float]):
        self.left, self.weights = collections.deque(row), collections.deque[Action]()
        self._room, self._holds, self._amounts = room * (1 + _ROUNDING), 0.0, amounts
        self._next = {(stage, kind): Action(stage, kind, 0) for stage, kind, _ in row}
        self._number = 1 + max(action.microbatch for action in row)  # of microbatches

    def run(self, done: Set[Action]) -> Action | None:
        """Runs one action, given those that are done; None if the rank waits."""
        first = self.left[0] if self.left else None
        ready = first is not None and self._ready(first, done)
        if first and ready and (not self.weights or self._holds + self._growth(first) <= self._room):
            action = self.left.popleft()
        elif self.weights:
            action = self.weights.popleft()
        elif overtaking := self._overtaking(done):
            self.left.remove(action := overtaking)
        else:
            return None
        if action.kind is Kind.W:
            self._holds -= self._amounts[action.stage]
            return action
        if action.kind is Kind.I:
            self.weights.append(action._replace(kind=Kind.W))
        self._next[action.stage, action.kind] = action._replace(microbatch=action.microbatch + 1)
        self._holds += self._growth(action)
        return action

    def _overtaking(self, done: Set[Action]) -> Action | None:
        """The first action that can run now and leaves room for all before it, given that no W waits.

        The room is enough if each I frees what its F took, since its W may follow at once. Of a stage's F, or I, a
        later one cannot run if the first cannot.
        """
        ready = {each for each in self._next.values() if each.microbatch < self._number and self._ready(each, done)}
        holds = most = self._holds
        for action in self.left if ready else ():
            if action in ready and most + self._growth(action) <= self._room:
                return action
            holds += self._growth(action) - self._amounts[action.stage] * (action.kind is Kind.I)
            most = max(most, holds)
            ready.discard(action)
            if not ready:
                break
        return None

    def _ready(self, action: Action, done: Set[Action]) -> bool:
        return all(need in done for need in action.needs(len(self._amounts)))

    def _growth(self, action: Action) -> float:
        return self._amounts[action.stage] * (action.kind is Kind.F)
