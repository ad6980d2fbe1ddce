"""Pipelines of the planner's space: what one holds and what a batch takes in it, for any costs.

The simulator's lockstep clock tells the time. From some number of microbatches on a schedule repeats (`Shape.onset`,
`Shape.period`): each microbatch more takes as much time more. So a long pipeline is simulated at two short lengths and
drawn out, which is exact, and what it holds has a closed form. Tests hold both against the whole lowering. Imports no
jax.
"""

import functools
from typing import NamedTuple

from fiddlex.pipeline.frame import Sizes, Slots, make_frame
from fiddlex.pipeline.generators import GENERATORS, make_schedule
from fiddlex.pipeline.lowering import lower
from fiddlex.pipeline.schedule import Schedule
from fiddlex.pipeline.semantics import make_semantics
from fiddlex.pipeline.ticks import place
from fiddlex.pipeline.windows import Windows, unroll
from fiddlex.simulate.clock import Costs
from fiddlex.simulate.lockstep import TickWork
from fiddlex.simulate.steady import steady

SCHEDULES = ("1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zb_v")  # gpipe takes as long as 1f1b and holds more


class Shape(NamedTuple):
    """A pipeline, whatever runs in it.

    Attributes:
      schedule: by name.
      pipe: ranks.
      chunks: stages on each.
      num_microbatches: of a replica's batch.
      semantics: of the weights, sync or 2bw.
    """

    schedule: str
    pipe: int
    chunks: int
    num_microbatches: int
    semantics: str = "sync"

    @property
    def period(self) -> int:
        """Microbatches after which the schedule repeats."""
        return self.pipe if self.schedule == "interleaved_1f1b" else 1

    @property
    def onset(self) -> int:
        """Microbatches from which on it does."""
        return (3 if self.schedule == "zb_h2" else 2) * self.pipe

    @property
    def goes_on(self) -> bool:
        """Whether the pipeline never waits for an update (DESIGN: 2BW needs 2(p − 1) microbatches for that)."""
        return self.semantics != "sync" and self.num_microbatches >= 2 * (self.pipe - 1)


def stage_ranks(shape: Shape) -> tuple[int, ...]:
    """The rank of each stage."""
    return _schedule(shape.schedule, shape.pipe, shape.chunks, shape.period).placement


def batch_seconds(shape: Shape, costs: Costs) -> float:
    """Seconds of a batch in the lockstep clock; of a pipeline that goes on, on average once it is full.

    Args:
      shape: the pipeline.
      costs: in seconds, for its stages.
    """
    if shape.semantics != "sync" and not shape.goes_on:
        return steady(_windows(shape), costs).period
    period, m = shape.period, shape.num_microbatches
    long = shape.onset + m % period
    if m <= long + period and not shape.goes_on:
        return _seconds(shape, m, costs)
    first, second = (_seconds(shape, number, costs) for number in (long, long + period))
    each = (second - first) / period
    return m * each if shape.goes_on else first + (m - long) * each


def sizes(shape: Shape) -> Sizes:
    """What the pipeline holds."""
    p, v, m = shape.pipe, shape.chunks, shape.num_microbatches
    if shape.semantics != "sync":
        return _windows(shape).sizes if v > 1 or p == 1 else Sizes(Slots(2, 2, 2 * p - 1, 0), 2, 2, 1, 2, 1)
    known = {
        "1f1b": lambda: Slots(2, 2, 2 * p - 1, 0),
        "interleaved_1f1b": lambda: Slots(2, 2, p * v + p - 1, 0),
        "zb_h1": lambda: Slots(2, 2, p, p),
        "zb_h2": lambda: Slots(3, 2, 2 * p - 1, 2 * p - 1),
        "zb_v": lambda: Slots(3, 3, 2 * p, 2 * p - 1),
    }
    if shape.schedule in known and m >= 2 * p and p > 2:
        return Sizes(known[shape.schedule]())
    return make_frame(lower(_schedule(shape.schedule, p, v, m)), m).sizes


def _seconds(shape: Shape, num_microbatches: int, costs: Costs) -> float:
    return _ticks(shape.schedule, shape.pipe, shape.chunks, num_microbatches).times(costs).makespan


@functools.lru_cache(maxsize=256)
def _ticks(name: str, pipe: int, chunks: int, num_microbatches: int) -> TickWork:
    schedule = GENERATORS[name](pipe=pipe, chunks=chunks, num_microbatches=num_microbatches)
    ticks = place(schedule)
    return TickWork.of(schedule, ticks, num_ticks=1 + max(map(max, ticks)))


@functools.lru_cache(maxsize=256)
def _schedule(name: str, pipe: int, chunks: int, num_microbatches: int) -> Schedule:
    return make_schedule(name, pipe=pipe, chunks=chunks, num_microbatches=num_microbatches)


@functools.lru_cache(maxsize=64)
def _windows(shape: Shape) -> Windows:
    make = functools.partial(_schedule, shape.schedule, shape.pipe, shape.chunks)
    stages, m = shape.pipe * shape.chunks, shape.num_microbatches
    return unroll(make(m), make_semantics(shape.semantics, num_stages=stages, batch_size=m), make)
