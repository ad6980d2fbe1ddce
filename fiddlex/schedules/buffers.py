"""How many buffers of each kind a pipeline needs on a device."""

from collections.abc import Sequence
from typing import NamedTuple

IN_TRANSIT = 1  # slots that a device takes, besides those of its stash, for the value that a spill or fetch copies


class Slots(NamedTuple):
    """Number of slots of each memory, including the trash slots of the inboxes and of a host stash that is used."""

    forward_inbox: int
    backward_inbox: int
    stash: int
    weight_stash: int
    host_stash: int = 0


class Sizes(NamedTuple):
    """The number of buffers of each kind."""

    slots: Slots
    versions: int = 1  # of the weights
    batches: int = 1  # in flight in a step: the step's own batch and later ones
    sums: int = 1  # batches whose gradients one chunk accumulates at the same time
    outer_sums: int = 1  # batches whose gradients embedding and head accumulate at the same time, until a step ends
    # Batches whose gradient a chunk may complete before their step ends, 1 if it goes to the host; 0: it stays in sums.
    finished: int = 0
    # 0, or `versions` if first and last stage differ in delay: if weights are predicted, the head then has its own.
    head_versions: int = 0
    # Rows of weights in a transfer from the host, or of gradients to it (`weight_stream`); 0: all are on the device.
    streamed: int = 0


def largest(sizes: Sequence[Sizes]) -> Sizes:
    """The smallest sizes that are enough for each of several sizes."""
    slots = Slots(*map(max, zip(*(each.slots for each in sizes), strict=True)))
    return Sizes(slots, *map(max, zip(*(each[1:] for each in sizes), strict=True)))
