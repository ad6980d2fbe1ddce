"""How many buffers of each kind a pipeline takes on a device."""

from collections.abc import Sequence
from typing import NamedTuple


class Slots(NamedTuple):
    """How many slots each memory has, the trash of an inbox included."""

    forward_inbox: int
    backward_inbox: int
    stash: int
    weight_stash: int


class Sizes(NamedTuple):
    """How much there is of everything.

    Attributes:
      slots: of each memory.
      versions: of the weights.
      batches: that are under way in a step: its own and those after it.
      sums: gradients of one chunk, of different batches, that are being added up at once.
      outer_sums: likewise of embedding and head, until the end of a step.
      finished: batches of which some chunk's gradient may be complete before the step that is for them has ended; 0:
        complete gradients are left among the sums.
    """

    slots: Slots
    versions: int = 1
    batches: int = 1
    sums: int = 1
    outer_sums: int = 1
    finished: int = 0


def largest(sizes: Sequence[Sizes]) -> Sizes:
    """What is enough for all of several sizes."""
    slots = Slots(*map(max, zip(*(each.slots for each in sizes), strict=True)))
    return Sizes(slots, *map(max, zip(*(each[1:] for each in sizes), strict=True)))
