"""V-Half and V-Min: two stages per rank in a V, with about a half and a third of the activation memory of 1F1B.

They follow "Pipeline Parallelism with Controllable Memory" (Qi et al., NeurIPS 2024), sections 3 and 4: each repeats
one block (`fiddlex.schedules.repeated_blocks`). With unit costs a block repeats every 6 units, the work of a rank for
one microbatch. How long a block lasts on a rank, divided by 6, tells how many activations the rank holds, so a block
whose passes go from rank to rank sooner needs less memory.

With unit costs and two microbatches or more, V-Min has the bubble 4p−5, or 4p−3 if p is a multiple of 3. From its
memory in microbatches on, V-Half has 3p−4 for p > 2. 1F1B with two chunks as one stage has 6(p−1). Invariant: for any
number of microbatches, a rank never holds more activations (from F to the end of W, in microbatches of the whole rank)
than (p+4) div 3 for V-Min or (p+2) div 2 for V-Half.
"""

from collections.abc import Sequence

from fiddlex.schedules.buffers import Slots
from fiddlex.schedules.repeated_blocks import even_block, repeated
from fiddlex.schedules.schedule import Schedule
from fiddlex.schedules.traits import Traits, with_traits


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


def _v_schedule(name: str, pipe: int, num_microbatches: int, *, steps: Sequence[int], held: int) -> Schedule:
    """The schedule whose passes have these paces: F down the V, F up, I down and I up."""
    placement = (*range(pipe), *reversed(range(pipe)))
    block = even_block(placement, steps)
    assert block is not None, f"{name} on {pipe} ranks"
    return repeated(name, placement, block, num_microbatches, room=[held] * pipe, amounts=[0.5] * (2 * pipe))
