"""DualPipeV: two stages per rank in a V, with forwards and whole backwards in pairs and a few backwards split.

The order is that of `ScheduleDualPipeV` in torch.distributed.pipelining: DeepSeek's DualPipe (DeepSeek-V3 technical
report, section 3.2.1), cut in half so that no two ranks hold the same weights. In the middle of a batch each rank runs
a forward on one of its stages and then a backward on the other. Neither needs the other, so the communication of one
may run beside the products of the other.

From 2p−1 microbatches on, the bubble is (p−1)(F+I−W) for W ≤ I ≤ F ≤ I+W, where F, I and W are the times of one stage.
The published bubble, (p−1)(F&B + B − 3W) with B = I+W, is larger where F&B = F+B: there a pair is one action, so that
the next rank gets the forward's output only after the backward. With fewer microbatches the bubble grows by 2W for each
microbatch down to p, and then by F+I for each. Invariant: for any number of microbatches, a rank never holds more
activations than p + 1/2 microbatches of the whole rank.

The ticks keep the order (`Schedule.strict`). If a forward and a backward shared a tick, each of the 4p − 2 ticks in
which a microbatch goes there and back would take as long as both, so a batch would be slower and hold as much.
"""

import collections

from fiddlex.schedules.buffers import Slots
from fiddlex.schedules.schedule import Action, Kind, Schedule
from fiddlex.schedules.traits import Traits, with_traits


def _most_split(pipe: int, num_microbatches: int) -> int:
    """The most I on a rank that wait for their W, if there is more than one rank."""
    missing = max(2 * pipe - 1 - num_microbatches, 0)
    return max(pipe - 2 * missing, (pipe - missing + 1) // 2, 1)


@with_traits(
    Traits(
        slots=lambda p, v, m: Slots(2 + (m > 1), 2 + (m > 1), min(2 * m, 2 * p + 1), _most_split(p, m)),
        splits_backward=True,
        chunks=(2,),
        searched=("sync",),  # under 2BW, 1F1B has no bubble either and holds less
    )
)
def dual_pipe_v(*, pipe: int, chunks: int = 2, num_microbatches: int) -> Schedule:
    """A forward on one stage, then a whole backward on the other, in turn; the first and last backwards are split.

    Rank r holds stages r and 2p−1−r, and splits its first p−r−1 backwards and its last p. With fewer than 2p−1
    microbatches the order is that of 2p−1 without the surplus microbatches, which stays legal and needs no more memory.
    """
    del chunks  # two stages per rank; make_schedule refuses any other number
    rows = [
        tuple(
            action
            for action in _order(rank, pipe, max(num_microbatches, 2 * pipe - 1))
            if action.microbatch < num_microbatches
        )
        for rank in range(pipe)
    ]
    return Schedule("dual_pipe_v", tuple(rows), (*range(pipe), *reversed(range(pipe))), strict=True)


def _order(rank: int, pipe: int, num_microbatches: int) -> list[Action]:
    """One rank's actions, for at least 2p−1 microbatches; a W takes the oldest I that has none."""
    below, drain = pipe - rank - 1, ("u", "d") * (rank + 1)
    steps = (
        *["dF"] * (2 * below),
        *["dF", "uF"] * (rank + 1),
        *["uI", "W", "uF"] * below,
        *["dF", "uB", "uF", "dB"] * (num_microbatches - 2 * pipe + rank + 1),
        *["uB", "uF", "dB"] * below,
        *[f"{side}B" for side in drain[: rank + 1]],
        *[f"{side}I" for side in drain[rank + 1 :]],
        *["W", "dI"] * below,
        *["W"] * (rank + 1),
    )
    stages = {"d": rank, "u": 2 * pipe - 1 - rank}  # on the way down the V and up
    next_microbatch: collections.Counter[tuple[str, bool]] = collections.Counter()
    split: collections.deque[Action] = collections.deque()
    row = []
    for step in steps:
        if step == "W":
            action = split.popleft()._replace(kind=Kind.W)
        else:
            side, kind = step[0], Kind(step[1])
            number = side, kind is Kind.F
            action = Action(stages[side], kind, next_microbatch[number])
            next_microbatch[number] += 1
            if kind is Kind.I:
                split.append(action)
        row.append(action)
    return row
