"""Schedules that repeat one block: the F and I of a microbatch on all ranks, every so many units of time.

"Pipeline Parallelism with Controllable Memory" (Qi et al., NeurIPS 2024), section 3, describes schedules in this way.
All actions take one unit here. A block gives a whole schedule if no two actions of a rank meet when it repeats. F and I
keep the order of the blocks; a W runs where its rank would wait, or where the rank's memory is full.
"""

import collections
from collections.abc import Sequence
from typing import NamedTuple

from fiddlex.schedules.schedule import Action, Kind, Schedule

_MOST_WAIT = 6  # units for which a block waits at the end of a pass
_ROUNDING = 1e-9  # relative; sums of amounts differ by less


class Block(NamedTuple):
    """The start of each F and I of a microbatch, and the units after which the next microbatch follows.

    Attributes:
      starts: (stage, F or I) → unit.
      period: units between two microbatches.
    """

    starts: dict[tuple[int, Kind], int]
    period: int


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


def even_block(placement: Sequence[int], paces: Sequence[int]) -> Block | None:
    """A block whose passes go from rank to rank at an even pace, each as early as no two actions of a rank meet.

    Args:
      placement: the rank of each stage.
      paces: for each of `passes_of`, the units from one rank's action to the next one's.

    Returns:
      The block, whose period is the work of the rank with most stages; None if a pass would wait too long.
    """
    ranks = range(1 + max(placement))
    period = 3 * max(map(list(placement).count, ranks))
    starts: dict[tuple[int, Kind], int] = {}
    taken: list[set[int]] = [set() for _ in ranks]
    begin = 0
    for actions, pace in zip(passes_of(placement), paces, strict=True):
        own = [placement[stage] for stage, _ in actions]
        for wait in range(_MOST_WAIT + 1):
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
    """Repeats a block for every microbatch.

    Args:
      name: name of the schedule.
      placement: the rank of each stage.
      block: the block.
      num_microbatches: microbatches in the batch.
      room: the most that each rank may hold.
      amounts: what one microbatch of each stage takes from its F to the end of its W.

    Returns:
      The schedule. A rank holds no more than its room unless its F and I alone do.
    """
    rows: list[list[tuple[int, Action]]] = [[] for _ in room]
    for (stage, kind), start in block.starts.items():
        for k in range(num_microbatches):
            rows[placement[stage]].append((start + block.period * k, Action(stage, kind, k)))
    ordered = [[action for _, action in sorted(row)] for row in rows]
    return Schedule(name, _with_weights(ordered, room=room, amounts=amounts), tuple(placement))


def _with_weights(
    rows: Sequence[Sequence[Action]], *, room: Sequence[float], amounts: Sequence[float]
) -> tuple[tuple[Action, ...], ...]:
    """Adds the W of every I, each where its rank would wait if every action took one unit, or where memory is full.

    Args:
      rows: the F and I of each rank, in order; together they can run to their end.
      room: the most that each rank may hold.
      amounts: what one microbatch of each stage takes from its F to the end of its W.

    Returns:
      The rows with W. A rank holds no more than its room unless its F and I alone do.
    """
    full: list[list[Action]] = [[] for _ in rows]
    left = [collections.deque(row) for row in rows]
    waiting: list[collections.deque[Action]] = [collections.deque() for _ in rows]
    holds, done = [0.0] * len(rows), set[Action]()
    while any(left) or any(waiting):
        ran = []
        for rank, (queue, weights) in enumerate(zip(left, waiting, strict=True)):
            ready = queue and all(need in done for need in queue[0].needs(len(amounts)))
            fits = ready and holds[rank] + amounts[queue[0].stage] <= room[rank] * (1 + _ROUNDING)
            if ready and (queue[0].kind is Kind.I or fits or not weights):
                action = queue.popleft()
                if action.kind is Kind.I:
                    weights.append(action._replace(kind=Kind.W))
            elif weights:
                action = weights.popleft()
            else:
                continue
            holds[rank] += amounts[action.stage] * ((action.kind is Kind.F) - (action.kind is Kind.W))
            ran.append(action)
            full[rank].append(action)
        assert ran, "the F and I can run to their end"
        done.update(ran)
    return tuple(map(tuple, full))
