"""What a program must know to run the tables of a pipeline, but for the tables themselves.

Programs are compiled for a spec, and take tables as they take data: all windows of a run have the same spec.
"""

import dataclasses

from fiddlex.schedules.buffers import Sizes, Slots
from fiddlex.schedules.lowering import Lowered
from fiddlex.schedules.table import NONE


@dataclasses.dataclass(frozen=True)
class PipelineSpec:
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


def make_spec(lowered: Lowered, batch_size: int, sizes: Sizes | None = None) -> PipelineSpec:
    """The spec of a schedule.

    Args:
      lowered: the schedule, of one batch or of several.
      batch_size: microbatches in a batch.
      sizes: for several batches; by default those of one.
    """
    whole = (lowered.column("backward_chunk") != NONE) & (lowered.column("backward_weight_stash") == NONE)
    return PipelineSpec(
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
