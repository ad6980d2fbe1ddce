"""Zero-bubble schedules: they delay the weight gradient W, which no other action waits for, until it fills a bubble.

They follow "Zero Bubble Pipeline Parallelism" (Qi et al., ICLR 2024), sections 2 and 6; the orders are written out, not
found by a search. The bubbles are the paper's. For W ≤ F, ZB-H1 has the bubble (p−1)(F+I−W) from p microbatches on, and
ZB-H2 has (p−1)(F+I−2W), or none where that is negative, from 2p−1 microbatches on. For F=I=W, ZB-V has none from 2p−1
microbatches on. With fewer microbatches the bubbles are larger, but smaller than 1F1B's. Invariant: for any number of
microbatches, a rank never holds more activations (from F to the end of W, in microbatches of the whole rank) than p for
ZB-H1 and ZB-V, or 2p−1 for ZB-H2.
"""

import collections

from fiddlex.schedules.buffers import Slots
from fiddlex.schedules.schedule import Action, Kind, Schedule, alternate
from fiddlex.schedules.traits import Traits, with_traits


@with_traits(
    Traits(
        slots=lambda p, v, m: Slots(2, 2, min(m, p), min(m, p)),
        splits_backward=True,
        searched=("sync",),
        never_waits=True,
    )
)
def zb_h1(*, pipe: int, chunks: int = 1, num_microbatches: int) -> Schedule:
    """1F1B with split backwards and the memory of 1F1B: rank r delays each W by r microbatches (section 2.1).

    Rank r holds up to p−r whole microbatches and r weight-gradient stashes, so p in all on every rank. At the start the
    last rank runs its first p microbatches without a W between them, which shortens the drain.
    """
    del chunks  # one stage per rank; make_schedule refuses any other number
    rows = [_delayed_weights(rank, num_microbatches, warmup=pipe - rank - 1, delay=rank) for rank in range(pipe)]
    return Schedule("zb_h1", tuple(rows), tuple(range(pipe)))


@with_traits(
    Traits(
        slots=lambda p, v, m: Slots(2 + (m > 2), 2, min(m, 2 * p - 1), min(m, 2 * p - 1)),
        onset=lambda p: 3 * p,
        splits_backward=True,
        searched=("sync",),
    )
)
def zb_h2(*, pipe: int, chunks: int = 1, num_microbatches: int) -> Schedule:
    """ZB-H1 with enough extra warmup forwards to fill the first bubble (section 2.2).

    Rank r warms up with 2(p−r−1) forwards and delays each W by 2r microbatches; every rank holds up to 2p−1.
    """
    del chunks  # one stage per rank; make_schedule refuses any other number
    rows = [
        _delayed_weights(rank, num_microbatches, warmup=2 * (pipe - rank - 1), delay=2 * rank) for rank in range(pipe)
    ]
    return Schedule("zb_h2", tuple(rows), tuple(range(pipe)))


@with_traits(
    Traits(
        slots=lambda p, v, m: Slots(
            2 + (m > 1), 2 + (m > p), 2 * min(m, p), 1 if m <= p else min(2 * (m - p) + 1, 2 * p - 1)
        ),
        splits_backward=True,
        chunks=(2,),
        searched=("sync",),
    )
)
def zb_v(*, pipe: int, chunks: int = 2, num_microbatches: int) -> Schedule:
    """Two stages per rank, placed in a V: rank r holds stages r and 2p−1−r (section 6).

    The loss of a microbatch is computed on the rank where the microbatch entered, so its backward starts at once. The
    memory of a rank's two stages adds up to the same on every rank. With fewer than 2p−1 microbatches, the order is
    that of 2p−1 without the surplus microbatches, which stays legal and needs no more memory.
    """
    del chunks  # two stages per rank; make_schedule refuses any other number
    rows = [
        tuple(
            action
            for action in _v_order(rank, pipe, max(num_microbatches, 2 * pipe - 1))
            if action.microbatch < num_microbatches
        )
        for rank in range(pipe)
    ]
    return Schedule("zb_v", tuple(rows), (*range(pipe), *reversed(range(pipe))))


def _delayed_weights(stage: int, num_microbatches: int, *, warmup: int, delay: int) -> tuple[Action, ...]:
    """1F1B with I instead of B; the W of microbatch k directly follows the I of microbatch k + `delay`."""
    forwards, inputs, weights = (
        [Action(stage, kind, microbatch) for microbatch in range(num_microbatches)] for kind in (Kind.F, Kind.I, Kind.W)
    )
    row = []
    for action in alternate(forwards, inputs, warmup=warmup):
        row.append(action)
        if action.kind is Kind.I and action.microbatch >= delay:
            row.append(weights[action.microbatch - delay])
    return (*row, *weights[max(num_microbatches - delay, 0) :])


def _v_order(rank: int, pipe: int, num_microbatches: int) -> list[Action]:
    """One rank's actions of ZB-V, for at least 2p−1 microbatches.

    With unit costs rank r starts at time r; its first uF can start at 2p−1−r and its first uI at 2p+r, and the first
    three phases start them exactly then. These phases fill the memory to 2p chunks, and every later phase frees a chunk
    for each one that it takes. In the drain the I of the last microbatches are on the critical path, so W waits: rank r
    runs its last 2r W at the end.
    """
    phases = (
        ("dF", 2 * (pipe - rank) - 1),
        ("uF dF", rank),
        ("uF uI uW", pipe - rank),
        ("dF dI dW uF uI uW", num_microbatches - (2 * pipe - 1 - rank)),
        ("dI dW uF uI uW", pipe - rank - 1),
        ("dI uI", rank),
        ("dI dW", pipe - rank),
        ("uW dW", rank),
    )
    stages = {"d": rank, "u": 2 * pipe - 1 - rank}  # on the way down the V and up
    next_microbatch: collections.Counter[str] = collections.Counter()
    row = []
    for pattern, repeats in phases:
        for step in pattern.split() * repeats:
            row.append(Action(stages[step[0]], Kind(step[1]), next_microbatch[step]))
            next_microbatch[step] += 1
    return row
