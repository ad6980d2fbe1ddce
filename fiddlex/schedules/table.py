"""The columns of the table that the executor steps through, and the memory whose slots they name.

A row of the table is what one device does in one tick. Every device has four memories with numbered slots: an inbox for
activations and one for gradients, where what arrives waits to be used; the stash, which keeps what a forward leaves for
its backward; and the weight stash, which keeps what I leaves for W. `accesses` is the one place that says which column
names slots of which memory, and when in a tick the slot is written or read.
"""

import enum
from typing import NamedTuple

NONE = -1


class TickPhase(enum.IntEnum):
    """What happens in a tick, in this order on every device; lifetimes are counted in phases."""

    EMBED = 0  # the gradients of the tick before set out
    FORWARD = 1
    BETWEEN = 2  # activations set out, gradients arrive; the head scores if `Lowered.scores_between`
    BACKWARD = 3
    WEIGHT = 4
    END = 5  # activations arrive; the head scores otherwise; the first stage's gradient reaches the embedding


class Tick(NamedTuple):
    """The columns of the table by name; `NONE` where there is nothing to do or to read.

    The first six are the same on all devices, since all embed and score; all other columns are the device's own.
    Behind these columns stand those of the hops: for each of `Lowered.forward_shifts`, then for each of
    `Lowered.backward_shifts`, the inbox slot for what arrives from the rank that many before.

    Attributes:
      embed: microbatch that enters the first stage.
      head: microbatch that leaves the last stage and is scored, between the slots or at the tick's end.
      embed_backward: microbatch whose gradient leaves the first stage.
      embed_version: age of the weights that embed, in updates, 0 the newest.
      head_version: age of the weights that score.
      embed_backward_version: age of the weights that embedded the microbatch whose gradient leaves.
      is_last: 1 when this device's forward is the last stage's.
      is_first: 1 when this device's backward is the first stage's.
      head_inbox: slot of the backward inbox for the gradient that the head gives; the trash on other devices.
      forward_chunk: chunk that runs forward.
      forward_microbatch: on which microbatch.
      forward_inbox: its input; NONE: what was embedded in this tick.
      forward_stash: slot for what its backward needs.
      forward_version: age of its weights.
      backward_chunk: chunk that runs backward, B or I.
      backward_microbatch: on which microbatch.
      backward_inbox: the gradient of its output.
      backward_stash: what its forward left.
      backward_version: age of its weights, that of its forward.
      backward_weight_stash: slot for what W needs; NONE when the weight gradient is taken at once (B).
      backward_finishes: 1 when the chunk's gradient for a batch is complete with this.
      weight_chunk: chunk whose weight gradient is taken (W).
      weight_microbatch: for which microbatch.
      weight_stash: what its forward left.
      weight_weight_stash: what its I left.
      weight_version: age of its weights, that of its forward.
      weight_finishes: 1 when the chunk's gradient for a batch is complete with this.
    """

    embed: int = NONE
    head: int = NONE
    embed_backward: int = NONE
    embed_version: int = NONE
    head_version: int = NONE
    embed_backward_version: int = NONE
    is_last: int = 0
    is_first: int = 0
    head_inbox: int = NONE
    forward_chunk: int = NONE
    forward_microbatch: int = NONE
    forward_inbox: int = NONE
    forward_stash: int = NONE
    forward_version: int = NONE
    backward_chunk: int = NONE
    backward_microbatch: int = NONE
    backward_inbox: int = NONE
    backward_stash: int = NONE
    backward_version: int = NONE
    backward_weight_stash: int = NONE
    backward_finishes: int = NONE
    weight_chunk: int = NONE
    weight_microbatch: int = NONE
    weight_stash: int = NONE
    weight_weight_stash: int = NONE
    weight_version: int = NONE
    weight_finishes: int = NONE


COLUMNS = {name: index for index, name in enumerate(Tick._fields)}

FORWARD_HOPS, BACKWARD_HOPS = "forward_hops", "backward_hops"  # the columns behind those of `Tick`, see there


class Access(NamedTuple):
    """What a column that names slots does with them.

    Attributes:
      memory: `forward_inbox`, `backward_inbox`, `stash` or `weight_stash`.
      phase: the part of a tick in which the slot is written or read.
      reader: `forward`, `backward` or `weight`, the work that reads the slot; None: the slot is written.
    """

    memory: str
    phase: TickPhase
    reader: str | None = None


def accesses(*, scores_between: bool) -> dict[str, Access]:
    """The access of every column that names slots, by the column's name.

    Args:
      scores_between: see `Lowered`.
    """
    return {
        FORWARD_HOPS: Access("forward_inbox", TickPhase.END),
        "forward_inbox": Access("forward_inbox", TickPhase.FORWARD, "forward"),
        BACKWARD_HOPS: Access("backward_inbox", TickPhase.BETWEEN),
        "head_inbox": Access("backward_inbox", TickPhase.BETWEEN if scores_between else TickPhase.END),
        "backward_inbox": Access("backward_inbox", TickPhase.BACKWARD, "backward"),
        "forward_stash": Access("stash", TickPhase.FORWARD),
        "backward_stash": Access("stash", TickPhase.BACKWARD, "backward"),
        "weight_stash": Access("stash", TickPhase.WEIGHT, "weight"),
        "backward_weight_stash": Access("weight_stash", TickPhase.BACKWARD),
        "weight_weight_stash": Access("weight_stash", TickPhase.WEIGHT, "weight"),
    }
