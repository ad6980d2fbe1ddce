"""The columns of the table that the executor steps through, and the memories whose slots they name.

A row of the table is what one device does in one tick. Every device has five memories with numbered slots: an inbox for
activations and an inbox for gradients, which hold what arrives until it is used; the stash, which holds what a forward
saves for its backward; the host stash, in the memory of the device's host, where a value of the stash waits between a
spill and a fetch; and the weight stash, which holds what an I saves for its W. Only `accesses` defines which column
names slots of which memory, and when in a tick the slot is written or read.
"""

import enum
from typing import NamedTuple

NONE = -1


class TickPhase(enum.IntEnum):
    """What happens in a tick, in this order on every device; lifetimes are counted in phases."""

    EMBED = 0  # the gradients of the previous tick are sent; a spill starts
    FORWARD = 1
    BETWEEN = 2  # activations are sent, gradients and the spill arrive; the head scores if `Lowered.scores_between`
    BACKWARD = 3  # begins with the start of a fetch
    WEIGHT = 4
    END = 5  # activations and the fetch arrive; the head scores otherwise; the embedding gets stage 0's gradient


class Tick(NamedTuple):
    """The columns of the table by name; `NONE` where there is nothing to do or to read.

    The first six columns are the same on all devices, since all devices embed and score; all other columns are the
    device's own. The columns of the hops follow: one for each of `Lowered.forward_shifts`, then one for each of
    `Lowered.backward_shifts`. Such a column names the inbox slot for what arrives from the rank that many ranks before.
    Versions are ages of weights in updates; 0 is the newest.
    """

    embed: int = NONE  # microbatch that enters the first stage
    head: int = NONE  # microbatch that leaves the last stage and is scored, between the slots or at the tick's end
    embed_backward: int = NONE  # microbatch whose gradient leaves the first stage
    embed_version: int = NONE
    head_version: int = NONE
    embed_backward_version: int = NONE  # of the weights that embedded the microbatch `embed_backward`
    is_last: int = 0  # 1 when this device runs the last stage's forward
    is_first: int = 0  # 1 when this device runs the first stage's backward
    # Slot of the gradient inbox for the gradient that the head returns; the trash on other devices.
    head_inbox: int = NONE
    forward_chunk: int = NONE
    forward_microbatch: int = NONE
    forward_inbox: int = NONE  # slot of the forward's input; NONE: the input is what was embedded in this tick
    forward_stash: int = NONE  # slot for what the forward saves for its backward
    forward_version: int = NONE
    backward_chunk: int = NONE  # chunk that runs backward, B or I
    backward_microbatch: int = NONE
    backward_inbox: int = NONE  # slot of the gradient of the chunk's output
    backward_stash: int = NONE  # slot of what the forward saved for this backward
    backward_version: int = NONE  # the same weights as in its forward
    # Slot of the weight stash for what W needs; NONE: the weight gradient is computed at once (B).
    backward_left: int = NONE
    backward_finishes: int = NONE  # 1 when this backward completes the chunk's gradient for a batch
    weight_chunk: int = NONE  # chunk whose weight gradient is computed (W)
    weight_microbatch: int = NONE
    weight_stash: int = NONE  # slot of the stash with what the forward saved
    weight_left: int = NONE  # slot of the weight stash with what the I left for this W
    weight_version: int = NONE  # the same weights as in its forward
    weight_finishes: int = NONE  # 1 when this W completes the chunk's gradient for a batch
    spill_chunk: int = NONE  # chunk of whose forward the stashed value is copied to the host
    spill_microbatch: int = NONE
    spill_stash: int = NONE  # slot of the stash that is copied; the forward of the same tick may use the slot again
    spill_host: int = NONE  # slot of the host stash for the copy, which is there after the forward
    fetch_chunk: int = NONE  # chunk of whose forward the stashed value is copied back
    fetch_microbatch: int = NONE
    fetch_host: int = NONE  # slot of the host stash that is copied
    fetch_stash: int = NONE  # slot of the stash for the copy, which is there at the tick's end


COLUMNS = {name: index for index, name in enumerate(Tick._fields)}

FORWARD_HOPS, BACKWARD_HOPS = "forward_hops", "backward_hops"  # the columns after those of `Tick`, described there


class Access(NamedTuple):
    """What a column that names slots does with them."""

    memory: str  # a field of `buffers.Slots`
    phase: TickPhase  # in which the slot is written or read
    # The work that reads the slot: `forward`, `backward`, `weight`, `spill` or `fetch`; None: it is written.
    reader: str | None = None


def accesses(*, scores_between: bool) -> dict[str, Access]:
    """The access of every column that names slots, by the column's name; for `scores_between` see `Lowered`."""
    return {
        FORWARD_HOPS: Access("forward_inbox", TickPhase.END),
        "forward_inbox": Access("forward_inbox", TickPhase.FORWARD, "forward"),
        BACKWARD_HOPS: Access("backward_inbox", TickPhase.BETWEEN),
        "head_inbox": Access("backward_inbox", TickPhase.BETWEEN if scores_between else TickPhase.END),
        "backward_inbox": Access("backward_inbox", TickPhase.BACKWARD, "backward"),
        "forward_stash": Access("stash", TickPhase.FORWARD),
        "backward_stash": Access("stash", TickPhase.BACKWARD, "backward"),
        "weight_stash": Access("stash", TickPhase.WEIGHT, "weight"),
        "spill_stash": Access("stash", TickPhase.EMBED, "spill"),
        "spill_host": Access("host_stash", TickPhase.BETWEEN),
        "fetch_host": Access("host_stash", TickPhase.BACKWARD, "fetch"),
        "fetch_stash": Access("stash", TickPhase.END),
        "backward_left": Access("weight_stash", TickPhase.BACKWARD),
        "weight_left": Access("weight_stash", TickPhase.WEIGHT, "weight"),
    }
