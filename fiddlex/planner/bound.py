"""A lower bound on the seconds of a batch, by which the search orders layouts and rules most of them out.

Invariant: no order of a batch's work takes less time in the lockstep clock.
"""

from collections.abc import Callable
from typing import NamedTuple

from fiddlex.planner.closed_forms import Shape, copies_of, sizes, stage_ranks
from fiddlex.planner.times import MicrobatchTimes
from fiddlex.schedules.placement import LayerPlacement, place_layers
from fiddlex.simulate.clock import Costs


class Cut(NamedTuple):
    """The placement of layers on stages, with the counts that the search needs."""

    placement: LayerPlacement
    rows: int  # of a stacked weight on each rank
    busiest: tuple[int, ...]  # layers of each stage of the rank that has most
    most: int  # layers on the rank that has most
    fewest: int  # layers of the stage that has fewest
    last: int  # layers on the rank that a microbatch reaches last
    before: int  # layers in the stages before the first one of that rank

    @classmethod
    def of(cls, schedule: str, pipe: int, chunks: int, num_layers: int, num_microbatches: int | None = None) -> "Cut":
        """The cut for up to `chunks` stages on each rank; only schedules without traits need the microbatches."""
        placement = place_layers(stage_ranks(Shape(schedule, pipe, chunks, num_microbatches or pipe)), num_layers)
        layers = placement.layers_per_stage
        work = [tuple(layers[stage] for stage in stages) for stages in placement.chunks]
        busiest = max(work, key=sum)
        last = max(range(pipe), key=lambda rank: min(placement.chunks[rank]))
        before = sum(layers[: min(placement.chunks[last])])
        return cls(placement, placement.rows_per_rank, busiest, sum(busiest), min(layers), sum(work[last]), before)


def least_seconds(shape: Shape, cut: Cut) -> Callable[[MicrobatchTimes], float]:
    """A lower bound on the seconds of a batch, for any order of its work, as a function of a microbatch's times.

    The rank with most layers processes all microbatches, and all ranks take part in the embedding and head of each. In
    ticks in which this rank runs nothing, another one runs an action. In a pipeline that is flushed, the rank that a
    microbatch reaches last is also idle until then, and from the end of its last backward pass until the first rank has
    run that microbatch's backward pass. Where the schedule splits backward passes, W fills this second gap.
    """
    m, traits, flushes = shape.num_microbatches, shape.traits, shape.semantics == "sync"
    idle_ticks = traits.idle_ticks(shape.pipe, shape.chunks, m) if flushes else 0
    whole = not traits.splits_backward

    def seconds(times: MicrobatchTimes) -> float:
        least = m * (cut.most * times.layer + times.edges)
        if flushes:
            idle = times.forward + (times.backward_input + times.backward_weight) * whole
            least += idle_ticks * cut.fewest * min(times.forward, times.backward_input, times.backward_weight)
            least = max(least, m * (cut.last * times.layer + times.head) + cut.before * idle)
        if not shape.streamed:
            return least
        costs = times.costs(cut.placement)
        return max(least, _least_copying(shape, cut, times, costs)) + sum(copies_of(shape).ends(costs))

    return seconds


def _least_copying(shape: Shape, cut: Cut, times: MicrobatchTimes, costs: Costs) -> float:
    """A lower bound on the seconds of all ticks of a batch whose weights come from the host.

    A rank runs the passes of its microbatches in as many ticks, except that the first backward pass can share the tick
    of the last forward pass. A single microbatch passes all stages and comes back in one tick less than twice their
    number. Every tick and every period waits for its copies.
    """
    m, copies = shape.num_microbatches, copies_of(shape)
    ticks = 2 * shape.chunks * max(m, shape.pipe) - 1
    spill = costs.spill if sizes(shape).slots.host_stash else 0.0
    linked = -(-ticks // copies.period) * copies.of_period(costs, spill=spill)
    backward = times.backward_input + times.backward_weight
    slots = [max(layers * time, spill) + spill for layers in cut.busiest for time in (times.forward, backward)]
    return max(linked, m * sum(slots) - 2 * spill)
