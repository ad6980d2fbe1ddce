"""Pipelines of the planner's space: what one holds and what a batch takes in it, for any costs.

The simulator's lockstep clock tells the time. From some number of microbatches on a schedule repeats (`Shape.onset`,
`Shape.period`): each microbatch more takes as much time more. So a long pipeline is simulated at two short lengths and
drawn out, which is exact, and what it holds has a closed form. Tests hold both against the whole lowering. Imports no
jax.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

from fiddlex.pipeline.columns import Columns
from fiddlex.pipeline.frame import Sizes, Slots, make_frame
from fiddlex.pipeline.generators import GENERATORS, make_schedule
from fiddlex.pipeline.lowering import lower
from fiddlex.pipeline.schedule import Schedule
from fiddlex.pipeline.semantics import make_semantics
from fiddlex.pipeline.ticks import place
from fiddlex.pipeline.windows import Windows, unroll
from fiddlex.simulate.clock import Costs, free_running
from fiddlex.simulate.lockstep import TickWork
from fiddlex.simulate.steady import steady


class Shape(NamedTuple):
    """A pipeline, whatever runs in it.

    Attributes:
      schedule: by name.
      pipe: ranks.
      chunks: stages on each.
      num_microbatches: of a replica's batch.
      semantics: of the weights.
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
        """Whether the pipeline surely never waits for an update: where all weights lag, from 2(p − 1) microbatches on.

        Not of schedules that run further ahead than a delay of one allows, as GPipe and ZB-H2 do.
        """
        semantics = make_semantics(self.semantics, num_stages=self.pipe * self.chunks, batch_size=self.num_microbatches)
        enough = self.num_microbatches >= 2 * (self.pipe - 1)
        return enough and min(semantics.delays) > 0 and self.schedule in ("1f1b", "interleaved_1f1b", "zb_h1")


def stage_ranks(shape: Shape) -> tuple[int, ...]:
    """The rank of each stage."""
    return _unproven(shape.schedule, shape.pipe, shape.chunks, shape.period).placement


def batch_seconds(shape: Shape, costs: Costs) -> float:
    """Seconds of a batch in the lockstep clock; of a pipeline that goes on, on average once it is full.

    Args:
      shape: the pipeline.
      costs: in seconds, for its stages.
    """
    goes_on, period, m = shape.goes_on, shape.period, shape.num_microbatches
    seconds = _seconds if goes_on or shape.semantics == "sync" else _steady_seconds
    long = shape.onset + m % period
    if m <= long + period and not goes_on:
        return seconds(shape, m, costs)
    first, second = (seconds(shape, number, costs) for number in (long, long + period))
    each = (second - first) / period
    return m * each if goes_on else first + (m - long) * each


def sizes(shape: Shape) -> Sizes:
    """What the pipeline holds."""
    p, v, m = shape.pipe, shape.chunks, shape.num_microbatches
    if shape.semantics == "sync" and shape.schedule not in _SLOTS:
        return make_frame(lower(_schedule(shape.schedule, p, v, m)), m).sizes
    if p == 1:  # each microbatch is done with before the next begins
        frame = make_frame(lower(_schedule(shape.schedule, p, v, 1)), 1)
        return frame.sizes if shape.semantics == "sync" else _windows(shape).sizes
    if (shape.schedule, shape.semantics) == ("1f1b", "2bw") and m >= p:
        return Sizes(Slots(2, 2, 2 * p - 1, 0), 2, 2, 1, 2, 1)
    if shape.semantics != "sync":
        return _windows(shape).sizes
    return Sizes(_SLOTS[shape.schedule](p, v, m))


# Of p > 1 ranks with v chunks and m microbatches, as the lowering gives them out.
_SLOTS: dict[str, Callable[[int, int, int], Slots]] = {
    "1f1b": lambda p, v, m: Slots(2, 2, min(m, 2 * p - 1), 0),
    "interleaved_1f1b": lambda p, v, m: Slots(2, 2, v * p + min(m // p - 1, 1) * (p - 1), 0),
    "zb_h1": lambda p, v, m: Slots(2, 2, min(m, p), min(m, p)),
    "zb_h2": lambda p, v, m: Slots(2 + (m > 2), 2, min(m, 2 * p - 1), min(m, 2 * p - 1)),
    "zb_v": lambda p, v, m: Slots(
        2 + (m > 1), 2 + (m > p), 2 * min(m, p), 1 if m <= p else min(2 * (m - p) + 1, 2 * p - 1)
    ),
}


def free_running_seconds(shape: Shape, costs: Costs) -> float:
    """Seconds of a batch that is flushed in the free-running clock, that of other systems; long pipelines drawn out.

    That is exact where stages are alike and hops far shorter than they are; others may take longer than this to settle,
    and it can be some percent off.

    Args:
      shape: the pipeline.
      costs: in seconds, for its stages.
    """
    p, v, m = shape.pipe, shape.chunks, shape.num_microbatches
    step, long = p, 3 * p + m % p
    if m <= long + step:
        return free_running(_unproven(shape.schedule, p, v, m), costs).makespan
    first, second = (
        free_running(_unproven(shape.schedule, p, v, number), costs).makespan for number in (long, long + step)
    )
    return first + (m - long) / step * (second - first)


def _seconds(shape: Shape, num_microbatches: int, costs: Costs) -> float:
    return _ticks(shape.schedule, shape.pipe, shape.chunks, num_microbatches).times(costs).makespan


def _steady_seconds(shape: Shape, num_microbatches: int, costs: Costs) -> float:
    return steady(_windows(shape._replace(num_microbatches=num_microbatches)), costs).period


@functools.lru_cache(maxsize=256)
def _ticks(name: str, pipe: int, chunks: int, num_microbatches: int) -> TickWork:
    schedule = _unproven(name, pipe, chunks, num_microbatches)
    columns = Columns.of(schedule, place(schedule))
    return TickWork.of(schedule, columns, num_ticks=1 + int(columns.tick.max()))


@functools.lru_cache(maxsize=256)
def _unproven(name: str, pipe: int, chunks: int, num_microbatches: int) -> Schedule:
    """Without `make_schedule`'s proof, which takes longer than all that is done with it; tests have it."""
    return GENERATORS[name](pipe=pipe, chunks=chunks, num_microbatches=num_microbatches)


@functools.lru_cache(maxsize=256)
def _schedule(name: str, pipe: int, chunks: int, num_microbatches: int) -> Schedule:
    return make_schedule(name, pipe=pipe, chunks=chunks, num_microbatches=num_microbatches)


@functools.lru_cache(maxsize=64)
def _windows(shape: Shape) -> Windows:
    make = functools.partial(_schedule, shape.schedule, shape.pipe, shape.chunks)
    stages, m = shape.pipe * shape.chunks, shape.num_microbatches
    return unroll(make(m), make_semantics(shape.semantics, num_stages=stages, batch_size=m), make)
