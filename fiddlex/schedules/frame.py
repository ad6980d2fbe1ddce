"""What a program must know to run the tables of a pipeline, but for the tables themselves.

Programs are compiled for a frame, and take tables as they take data: all windows of a run have the same frame.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from fiddlex.schedules.lowering import Lowered
from fiddlex.schedules.table import NONE


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
      batches: that are under way in a call: its own and those after it.
      sums: gradients of one chunk, of different batches, that are being added up at once.
      outer_sums: likewise of embedding and head, until the end of a call.
      finished: batches of which some chunk's gradient may be complete before the call that is for them has ended; 0:
        complete gradients are left among the sums.
    """

    slots: Slots
    versions: int = 1
    batches: int = 1
    sums: int = 1
    outer_sums: int = 1
    finished: int = 0


@dataclasses.dataclass(frozen=True)
class Frame:
    """The shape of a pipeline.

    Attributes:
      forward_shifts: see `Lowered`.
      backward_shifts: see `Lowered`.
      scores_between: see `Lowered`.
      trains: whether there are backward passes.
      has_whole: whether any of them is whole (B).
      splits: whether any is split (I and W).
      batch_size: microbatches in a batch.
      sizes: how much there is of everything.
    """

    forward_shifts: tuple[int, ...]
    backward_shifts: tuple[int, ...]
    scores_between: bool
    trains: bool
    has_whole: bool
    splits: bool
    batch_size: int
    sizes: Sizes


def make_frame(lowered: Lowered, batch_size: int, sizes: Sizes | None = None) -> Frame:
    """The frame of a schedule.

    Args:
      lowered: the schedule, of one batch or of several.
      batch_size: microbatches in a batch.
      sizes: for several batches; by default those of one.
    """
    whole = (lowered.column("backward_chunk") != NONE) & (lowered.column("backward_weight_stash") == NONE)
    return Frame(
        lowered.forward_shifts,
        lowered.backward_shifts,
        lowered.scores_between,
        trains=lowered.stash_slots > 0,
        has_whole=bool(whole.any()),
        splits=lowered.weight_stash_slots > 0,
        batch_size=batch_size,
        sizes=sizes or Sizes(slots_of(lowered)),
    )


def slots_of(lowered: Lowered) -> Slots:
    """The slots of a schedule's memories."""
    return Slots(
        lowered.forward_inbox_slots + 1,
        lowered.backward_inbox_slots + 1,
        lowered.stash_slots,
        lowered.weight_stash_slots,
    )


def largest(sizes: Sequence[Sizes]) -> Sizes:
    """What is enough for all of several sizes."""
    slots = Slots(*map(max, zip(*(each.slots for each in sizes), strict=True)))
    return Sizes(slots, *map(max, zip(*(each[1:] for each in sizes), strict=True)))
