"""V-Half and V-Min: two stages per rank in a V, with about a half and a third of the activation memory of 1F1B.

They follow "Pipeline Parallelism with Controllable Memory" (Qi et al., NeurIPS 2024), sections 3 and 4: each repeats
one block (`fiddlex.schedules.repeated_blocks`). With unit costs a block repeats every 6 units, the work of a rank for
one microbatch. A rank holds as many activations as the units that a block lasts on it, divided by 6, so a block whose
passes go from rank to rank sooner needs less memory. That number is rounded down to whole microbatches. Where this
leaves memory over, a block's backward pass begins later: ranks then have more to run while the pipeline fills and
drains.

With unit costs, p > 2 and more microbatches than fit into its memory, V-Half has the bubble 3p−7 if p is even, else
3p−4. V-Min has 4p−7, 4p−5 or 4p−9 if p leaves 0, 1 or 2 when divided by 3. 1F1B with two chunks as one stage has
6(p−1). The paper gives only about half and two thirds of that. The tables of the authors' generator have V-Half's
bubbles, and V-Min's except the last, which is 4p−5 there. Invariant: for any number of microbatches, a rank never holds
more activations (from F to the end of W, in microbatches of the whole rank) than (p+4) div 3 for V-Min or (p+2) div 2
for V-Half.
"""

import functools
import itertools
from collections.abc import Sequence

from fiddlex.schedules.buffers import Slots
from fiddlex.schedules.repeated_blocks import even_block, repeated
from fiddlex.schedules.schedule import Kind, Schedule
from fiddlex.schedules.traits import Traits, with_traits


def _half(pipe: int) -> int:
    return (pipe + 2) // 2


def _third(pipe: int) -> int:
    return (pipe + 4) // 3


def _half_idle(pipe: int, num_microbatches: int) -> int:
    return 3 * pipe - (4 if pipe % 2 else 7) if pipe > 2 and num_microbatches > _half(pipe) else 0


def _min_idle(pipe: int, num_microbatches: int) -> int:
    return 4 * pipe - (7, 5, 9)[pipe % 3] if pipe > 2 and num_microbatches > _third(pipe) else 0


@functools.lru_cache(maxsize=1024)
def _weight_stash(name: str, pipe: int, num_microbatches: int) -> int:
    """The most I that wait for their W on a rank; more microbatches than p + 1 do not change it."""
    generator = v_half if name == "v_half" else v_min
    most = 0
    for row in generator(pipe=pipe, num_microbatches=min(num_microbatches, pipe + 1)).actions:
        most = max(most, *itertools.accumulate((each.kind is Kind.I) - (each.kind is Kind.W) for each in row))
    return most


@with_traits(
    Traits(
        slots=lambda p, v, m: Slots(
            2 + (m > 1),
            2 + (m > (2 + p % 2 if p > 4 else p - 1)),
            2 * min(m, _half(p)),
            _weight_stash("v_half", p, m),
        ),
        splits_backward=True,
        idle_ticks=lambda p, v, m: _half_idle(p, m),
        chunks=(2,),
        searched=("sync",),
    )
)
def v_half(*, pipe: int, chunks: int = 2, num_microbatches: int) -> Schedule:
    """V with half of the activation memory of 1F1B: on the way to the loss, and back, passes alternate in speed."""
    del chunks  # two stages per rank; make_schedule refuses any other number
    loss_wait = 0 if pipe % 2 else 3
    return _v_schedule("v_half", pipe, num_microbatches, (1, 2, 1, 2), loss_wait=loss_wait, held=_half(pipe))


@with_traits(
    Traits(
        slots=lambda p, v, m: Slots(
            2 + (m > 1), 2 + (m > 1 + (p > 3)), 2 * min(m, _third(p)), _weight_stash("v_min", p, m)
        ),
        splits_backward=True,
        idle_ticks=lambda p, v, m: _min_idle(p, m),
        chunks=(2,),
        searched=("sync",),
    )
)
def v_min(*, pipe: int, chunks: int = 2, num_microbatches: int) -> Schedule:
    """V with a third of the activation memory of 1F1B: every pass goes to the next rank as soon as it can."""
    del chunks  # two stages per rank; make_schedule refuses any other number
    loss_wait = 2 if pipe % 3 == 1 else 4
    return _v_schedule("v_min", pipe, num_microbatches, (1, 1, 1, 1), loss_wait=loss_wait, held=_third(pipe))


def _v_schedule(
    name: str, pipe: int, num_microbatches: int, paces: Sequence[int], *, loss_wait: int, held: int
) -> Schedule:
    """The schedule whose passes have these paces: F down the V, F up, I down and I up."""
    placement = (*range(pipe), *reversed(range(pipe)))
    block = even_block(placement, paces, loss_wait=loss_wait)
    assert block is not None, f"{name} on {pipe} ranks"
    return repeated(name, placement, block, num_microbatches, room=[held] * pipe, amounts=[0.5] * (2 * pipe))
