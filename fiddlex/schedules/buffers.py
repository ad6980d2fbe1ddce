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
    """The number of buffers of each kind.

    Attributes:
      slots: number of slots of each memory.
      versions: number of weight versions.
      head_versions: `versions` if the first stage and the last have different delays, else 0: if weights are predicted,
        the head then has versions of its own.
      batches: number of batches in flight in a step: the step's own batch and later ones.
      sums: number of batches whose gradients one chunk accumulates at the same time.
      outer_sums: number of batches whose gradients embedding and head accumulate at the same time, until a step ends.
      finished: number of batches for which a chunk's gradient may be complete before the batch's own step ends, or 1
        if complete gradients go to the host; 0: complete gradients stay in the sums.
      streamed: number of rows of the layers' weights in a transfer from the host, or of their gradients
        (`fiddlex.schedules.weight_stream`); 0: all are on the device.
    """

    slots: Slots
    versions: int = 1
    batches: int = 1
    sums: int = 1
    outer_sums: int = 1
    finished: int = 0
    head_versions: int = 0
    streamed: int = 0


def largest(sizes: Sequence[Sizes]) -> Sizes:
    """The smallest sizes that are enough for each of several sizes."""
    slots = Slots(*map(max, zip(*(each.slots for each in sizes), strict=True)))
    return Sizes(slots, *map(max, zip(*(each[1:] for each in sizes), strict=True)))
