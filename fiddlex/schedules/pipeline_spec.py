"""What a program is compiled for, with tables of ticks as its input; all windows of a run have the same spec."""

import dataclasses

from fiddlex.schedules.buffers import Sizes, Slots
from fiddlex.schedules.lowering import Lowered
from fiddlex.schedules.table import NONE
from fiddlex.schedules.weight_stream import WeightStream


@dataclasses.dataclass(frozen=True)
class PipelineSpec:
    """The shape of a pipeline."""

    forward_shifts: tuple[int, ...]  # see `Lowered`, also for the next two fields
    backward_shifts: tuple[int, ...]
    scores_between: bool
    trains: bool  # whether the schedule has backward passes
    has_whole: bool  # whether any backward pass is whole (B)
    splits: bool  # whether any backward pass is split (I and W)
    batch_size: int  # in microbatches
    sizes: Sizes


def make_spec(
    lowered: Lowered, batch_size: int, sizes: Sizes | None = None, *, stream: WeightStream | None = None
) -> PipelineSpec:
    """The spec with these `sizes`; None: those of one batch, with weights from the host if there is a `stream`."""
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
    slots = slots_of(lowered)
    if stream is None:
        return Sizes(slots)
    return Sizes(slots, finished=int(lowered.stash_slots > 0), streamed=stream.rows)


def slots_of(lowered: Lowered) -> Slots:
    """The number of slots of each memory, including the trash slots."""
    return Slots(
        lowered.forward_inbox_slots + 1,
        lowered.backward_inbox_slots + 1,
        lowered.stash_slots,
        lowered.weight_stash_slots,
        lowered.host_stash_slots + (lowered.host_stash_slots > 0),
    )
