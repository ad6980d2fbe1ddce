"""V-Half and V-Min: two stages per rank in a V, with about a half and a third of the activation memory of 1F1B.

They follow "Pipeline Parallelism with Controllable Memory" (Qi et al., NeurIPS 2024), sections 3 and 4. A schedule of
this family repeats one building block: the start of each action of one microbatch on each rank. With unit costs a block
repeats every 6 units, the work of a rank for one microbatch. How long a block lasts on a rank, divided by 6, tells how
many activations the rank holds, so a block whose passes go from rank to rank sooner needs less memory. Only F and I
keep the order of the blocks. A W runs where its rank would wait, or where the rank's memory is full.

With unit costs and two microbatches or more, V-Min has the bubble 4p−5, or 4p−3 if p is a multiple of 3. From its
memory in microbatches on, V-Half has 3p−4 for p > 2. 1F1B with two chunks as one stage has 6(p−1). Invariant: for any
number of microbatches, a rank never holds more activations (from F to the end of W, in microbatches of the whole rank)
than (p+4) div 3 for V-Min or (p+2) div 2 for V-Half.
"""

import collections
import itertools
from collections.abc import Iterator, Sequence

from fiddlex.schedules.buffers import Slots
from fiddlex.schedules.schedule import Action, Kind, Schedule
from fiddlex.schedules.traits import Traits, with_traits

_PERIOD = 6  # F, I and W of two stages
_MOST_WAIT = 4  # units for which a block waits where it turns; enough for every pattern here and any number of ranks


def _half(pipe: int) -> int:
    return (pipe + 2) // 2


def _third(pipe: int) -> int:
    return (pipe + 4) // 3


@with_traits(
    Traits(
        slots=lambda p, v, m: Slots(
            2 + (p > 2 and m > 1),
            2 + (m > (1 if p % 2 == 0 else _half(p))),
            2 * min(m, _half(p)),
            2 + (p % 2 == 0 and m >= _half(p)),
        ),
        splits_backward=True,
        idle_ticks=lambda p, v, m: 3 * p - 4 if p > 2 and m >= _half(p) else 0,
        chunks=(2,),
        searched=("sync",),
    )
)
def v_half(*, pipe: int, chunks: int = 2, num_microbatches: int) -> Schedule:
    """V with half of the activation memory of 1F1B: on the way to the loss, and back, passes alternate in speed."""
    del chunks  # two stages per rank; make_schedule refuses any other number
    return _v_schedule("v_half", pipe, num_microbatches, steps=(1, 2, 1, 2), held=_half(pipe))


@with_traits(
    Traits(
        slots=lambda p, v, m: Slots(2 + (p > 3 and m > 1), 2 + (p % 3 == 0 and m > 1), 2 * min(m, _third(p)), 2),
        splits_backward=True,
        idle_ticks=lambda p, v, m: 4 * p - 5 + 2 * (p % 3 == 0) if p > 1 and m > 1 else 0,
        chunks=(2,),
        searched=("sync",),
    )
)
def v_min(*, pipe: int, chunks: int = 2, num_microbatches: int) -> Schedule:
    """V with a third of the activation memory of 1F1B: every pass goes to the next rank as soon as it can."""
    del chunks  # two stages per rank; make_schedule refuses any other number
    return _v_schedule("v_min", pipe, num_microbatches, steps=(1, 1, 1, 1), held=_third(pipe))


_ROUNDING = 1e-9  # relative; sums of amounts differ by less

Block = list[dict[tuple[int, Kind], int]]  # [rank] (chunk, kind) → start; chunk 0 lies on the way down the V


def _v_schedule(name: str, pipe: int, num_microbatches: int, *, steps: Sequence[int], held: int) -> Schedule:
    block = _block(pipe, steps)
    rows = []
    for rank, starts in enumerate(block):
        stages = (rank, 2 * pipe - 1 - rank)
        timed = sorted(
            (start + _PERIOD * microbatch, Action(stages[chunk], kind, microbatch))
            for (chunk, kind), start in starts.items()
            for microbatch in range(num_microbatches)
        )
        rows.append([action for _, action in timed])
    full = with_weights(rows, room=[held] * pipe, amounts=[0.5] * (2 * pipe))
    return Schedule(name, full, (*range(pipe), *reversed(range(pipe))))


def _block(pipe: int, steps: Sequence[int]) -> Block:
    """The block with the fewest waits in which no two actions of a rank start at the same time of a period.

    Args:
      pipe: number of ranks.
      steps: units between one rank's start and the next one's, for F down the V, F up, I down and I up.
    """
    for waits in _in_order_of_sum(_MOST_WAIT, 3):
        block = _block_with(pipe, steps, waits)
        if all(len({start % _PERIOD for start in starts.values()}) == len(starts) for starts in block):
            return block
    raise AssertionError(f"no block for {pipe} ranks with steps {steps}")


def _block_with(pipe: int, steps: Sequence[int], waits: Sequence[int]) -> Block:
    """The block whose second, third and fourth pass begin `waits` units after the pass before could have ended."""
    begins = [0]
    for step, wait in zip(steps, waits, strict=False):
        begins.append(begins[-1] + (pipe - 1) * step + 1 + wait)
    passes = ((0, Kind.F), (1, Kind.F), (1, Kind.I), (0, Kind.I))
    return [
        {
            key: begin + step * (rank if number % 2 == 0 else pipe - 1 - rank)
            for number, (key, begin, step) in enumerate(zip(passes, begins, steps, strict=True))
        }
        for rank in range(pipe)
    ]


def _in_order_of_sum(most: int, length: int) -> Iterator[tuple[int, ...]]:
    return iter(sorted(itertools.product(range(most + 1), repeat=length), key=lambda waits: (sum(waits), waits)))


def with_weights(
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
