"""What a program must know to run the tables of a pipeline, except for the tables themselves.

A program is compiled for a spec and takes tables as input data. All windows of a run have the same spec.
"""

import dataclasses

from fiddlex.schedules.buffers import Sizes, Slots
from fiddlex.schedules.lowering import Lowered
from fiddlex.schedules.table import NONE
from fiddlex.schedules.weight_stream import WeightStream


@dataclasses.dataclass(frozen=True)
class PipelineSpec:
    """The shape of a pipeline.

    Attributes:
      forward_shifts: the distances, in ranks, that activations travel (`Lowered.forward_shifts`).
      backward_shifts: the distances, in ranks, that gradients travel (`Lowered.backward_shifts`).
      scores_between: whether the head scores between the forward and the backward slot (`Lowered.scores_between`).
      trains: whether the schedule has backward passes.
      has_whole: whether any backward pass is whole (B).
      splits: whether any backward pass is split (I and W).
      batch_size: number of microbatches in a batch.
      sizes: the number of buffers of each kind.
    """

    forward_shifts: tuple[int, ...]
    backward_shifts: tuple[int, ...]
    scores_between: bool
    trains: bool
    has_whole: bool
    splits: bool
    batch_size: int
    sizes: Sizes


def make_spec(
    lowered: Lowered, batch_size: int, sizes: Sizes | None = None, *, stream: WeightStream | None = None
) -> PipelineSpec:
    """Returns the spec of a schedule.

    Args:
      lowered: the lowered schedule of one batch or of several.
      batch_size: number of microbatches in a batch.
      sizes: the sizes, where `lowered` has several batches; None: the sizes of a single batch.
      stream: when weights come from the host in a single batch; None: they are on the devices.
    """
    whole = (lowered.column("backward_chunk") != NONE) & (lowered.column("backward_left") == NONE)
    return PipelineSpec(
        lowered.forward_shifts,
        lowered.backward_shifts,
        lowered.scores_between,
        trains=lowered.stash_slots > 0,
        has_whole=bool(whole.any()),
        splits=lowered.weight_stash_slots > 0,
        batch_size=batch_size,
        sizes=sizes or _of_batch(lowered, stream),
    )


def _of_batch(lowered: Lowered, stream: WeightStream | None) -> Sizes:
    """The sizes of a single batch."""
    slots = slots_of(lowered)
    if stream is None:
        return Sizes(slots)
    return Sizes(slots, finished=int(lowered.stash_slots > 0), streamed=stream.rows)


def slots_of(lowered: Lowered) -> Slots:
    """Returns the number of slots of each memory of a schedule, including the trash slots."""
    return Slots(
        lowered.forward_inbox_slots + 1,
        lowered.backward_inbox_slots + 1,
        lowered.stash_slots,
        lowered.weight_stash_slots,
        lowered.host_stash_slots + (lowered.host_stash_slots > 0),
    )
