"""The buffers of a pipeline in the planner's space, and the time of a batch in it, for any costs.

The simulator's lockstep clock gives the time. A schedule with traits repeats from some number of microbatches on
(`fiddlex.schedules.traits`): every further period of microbatches adds the same time. So the planner simulates a long
pipeline at two short lengths and extrapolates, which is exact. Where weights come from the host, a period of ticks
lasts as long as the longer of its ticks and its copies, so the planner takes all ticks of a long pipeline, most of
which are like some tick of a short one. Tests compare all of this with the whole lowering. `fiddlex.planner.predict`
simulates pipelines of other schedules whole.
"""

import functools
from typing import NamedTuple

import numpy as np

from fiddlex.schedules.buffers import Sizes
from fiddlex.schedules.columns import KIND_NUMBERS, Columns
from fiddlex.schedules.generators import generator_of
from fiddlex.schedules.lowering import lower
from fiddlex.schedules.pipeline_spec import make_spec
from fiddlex.schedules.schedule import Kind, Schedule
from fiddlex.schedules.semantics import make_semantics
from fiddlex.schedules.ticks import fills_pairs, place
from fiddlex.schedules.traits import NO_TRAITS, Generator, Traits, traits_of
from fiddlex.schedules.weight_stream import transfer_of
from fiddlex.schedules.windows import Windows, unroll
from fiddlex.simulate.clock import Costs, free_running
from fiddlex.simulate.lockstep import TickWork
from fiddlex.simulate.steady import steady
from fiddlex.simulate.streaming import Copies


class Shape(NamedTuple):
    """The shape of a pipeline, independent of the model that runs in it."""

    schedule: str  # as `fiddlex.schedules.generators.make_schedule` names it
    pipe: int  # number of pipe ranks
    chunks: int  # number of stages on each rank
    num_microbatches: int  # of a replica's batch
    semantics: str = "sync"
    spills: bool = False  # whether what forwards save may wait on the host (`lowering.lower`)
    streamed: int = 0  # rows of a chunk whose weights come from the host (`weight_stream`); 0: they are on the device

    @property
    def traits(self) -> Traits:
        """`NO_TRAITS` where the schedule's generator has none."""
        return traits_of(generator_of(self.schedule)) or NO_TRAITS

    @property
    def never_waits(self) -> bool:
        """Whether the traits guarantee that the pipeline never waits for an update."""
        semantics = make_semantics(self.semantics, num_stages=self.pipe * self.chunks, batch_size=self.num_microbatches)
        enough = self.num_microbatches >= 2 * (self.pipe - 1)
        return enough and min(semantics.delays) > 0 and self.traits.never_waits


def stage_ranks(shape: Shape) -> tuple[int, ...]:
    """The rank of each stage."""
    traits = shape.traits  # with them, the placement does not depend on the microbatches
    return _schedule(shape, None if traits is NO_TRAITS else traits.period(shape.pipe)).placement


def shares_ticks(shape: Shape) -> bool:
    """Whether a forward and a backward may share a tick in the order that the generator gives."""
    return fills_pairs(_schedule(shape, shape.traits.period(shape.pipe)))


def batch_seconds(shape: Shape, costs: Costs) -> float:
    """Seconds of a batch in the lockstep clock; for a pipeline that is not flushed, the average once it is full."""
    if shape.spills and not sizes(shape).slots.host_stash:  # nothing is worth spilling
        shape = shape._replace(spills=False)
    if shape.streamed:
        return _streamed_seconds(shape, costs)
    never_waits, traits, m = shape.never_waits, shape.traits, shape.num_microbatches
    seconds = _seconds if never_waits or shape.semantics == "sync" else _steady_seconds
    period = traits.period(shape.pipe)
    long = traits.onset(shape.pipe) + m % period
    if m <= long + period and not never_waits:
        return seconds(shape, m, costs)
    first, second = (seconds(shape, number, costs) for number in (long, long + period))
    each = (second - first) / period
    return m * each if never_waits else first + (m - long) * each


def sizes(shape: Shape) -> Sizes:
    """The numbers of buffers that the pipeline holds."""
    found = _sizes(shape)
    if not shape.streamed:
        return found
    return found._replace(finished=1, streamed=copies_of(shape).rows)


def copies_of(shape: Shape) -> Copies:
    """The copies of weights from the host and of gradients to it; `shape.streamed` must be above 0."""
    rows, period = transfer_of(shape.streamed, max(shape.num_microbatches, shape.pipe))
    return Copies(rows, period, shape.streamed)


def _sizes(shape: Shape) -> Sizes:
    p, v, m, traits = shape.pipe, shape.chunks, shape.num_microbatches, shape.traits
    if shape.semantics != "sync":
        if shape.semantics == "2bw" and traits.sizes_2bw and 1 < p <= m and not shape.spills:
            return traits.sizes_2bw(p, v, m)
        return _windows(shape, generator_of(shape.schedule)).sizes
    if traits.slots is None:
        return make_spec(lower(_schedule(shape), spills=shape.spills), m).sizes
    if shape.spills and traits.spilled_slots:
        return Sizes(traits.spilled_slots(p, v, m))
    if shape.spills:  # its buffers are those of a pipeline that is just long enough to repeat
        period = traits.period(p)
        short = traits.onset(p) + period + m % period
        return make_spec(lower(_schedule(shape, min(m, short)), spills=True), m).sizes
    if p == 1 and not traits.chunk_major:  # a microbatch ends before the next but one begins
        return make_spec(lower(_schedule(shape, min(m, 2))), m).sizes
    return Sizes(traits.slots(p, v, m))


def free_running_seconds(shape: Shape, costs: Costs) -> float:
    """Seconds of a flushed batch in the free-running clock, the clock of other systems; extrapolates long pipelines.

    The extrapolation is exact where all stages take the same time and hops are far shorter than stages. Other pipelines
    may start to repeat only at greater lengths, so that the result can be wrong by some percent.
    """
    step, m = shape.pipe, shape.num_microbatches
    long = 3 * step + m % step
    if m <= long + step:
        return free_running(_schedule(shape), costs).makespan
    first, second = (free_running(_schedule(shape, number), costs).makespan for number in (long, long + step))
    return first + (m - long) / step * (second - first)


def _seconds(shape: Shape, num_microbatches: int, costs: Costs) -> float:
    shape = shape._replace(num_microbatches=num_microbatches)
    return _ticks(shape, generator_of(shape.schedule)).times(costs).makespan


def _streamed_seconds(shape: Shape, costs: Costs) -> float:
    m, short = shape.num_microbatches, max(shape.traits.onset(shape.pipe), shape.pipe + 2)
    few, copies = shape._replace(num_microbatches=min(m, short)), copies_of(shape)
    work, repeated = _streamed_ticks(few, generator_of(shape.schedule))
    lengths = work.times(costs).lengths
    times = np.ones(len(lengths), np.int64)
    if m > short:
        times[repeated] += m - short
    num_ticks = int(times[:-1].sum())
    times[-1] = copies.whole_periods(num_ticks) - num_ticks
    spill = costs.spill if shape.spills else 0.0
    periods = copies.lengthened(np.repeat(lengths, times), costs, spill=spill)
    return float(periods.sum()) + sum(copies.ends(costs))


def _steady_seconds(shape: Shape, num_microbatches: int, costs: Costs) -> float:
    shape = shape._replace(num_microbatches=num_microbatches)
    return steady(_windows(shape, generator_of(shape.schedule)), costs).period


# The caches' keys have the generator as well as its name, because a notebook may give the name to another generator.
@functools.lru_cache(maxsize=256)
def _ticks(shape: Shape, generator: Generator) -> TickWork:
    schedule = _made(shape, generator)
    columns = Columns.of(schedule, place(schedule))
    return TickWork.of(schedule, columns, num_ticks=1 + int(columns.tick.max()), spills=shape.spills)


@functools.lru_cache(maxsize=256)
def _streamed_ticks(shape: Shape, generator: Generator) -> tuple[TickWork, np.ndarray]:
    """The ticks of a chunk-major pipeline, with an idle one at the end, and the ticks that a longer one repeats.

    Each further microbatch adds a tick like each of the latter, in which all ranks run the same chunk and the rank that
    takes up the chunk first runs microbatch p, of p ranks. The tick before is like it, so that the same messages
    arrive.
    """
    schedule = _made(shape, generator)
    columns = Columns.of(schedule, place(schedule))
    work = TickWork.of(schedule, columns, num_ticks=2 + int(columns.tick.max()), spills=shape.spills)
    chunks = np.zeros(schedule.num_stages, np.int64)
    for stages in map(schedule.stages_of, range(schedule.num_ranks)):
        chunks[list(stages)] = range(len(stages))
    repeated = np.full((2, shape.chunks), len(work.edges[0]))
    here = columns.microbatch == shape.pipe
    forwards = columns.kind == KIND_NUMBERS[Kind.F]
    np.minimum.at(repeated, (forwards[here].astype(int), chunks[columns.stage[here]]), columns.tick[here])
    return work, repeated.ravel()


def _schedule(shape: Shape, num_microbatches: int | None = None) -> Schedule:
    number = num_microbatches or shape.num_microbatches
    return _made(shape._replace(num_microbatches=number), generator_of(shape.schedule))


@functools.lru_cache(maxsize=256)
def _made(shape: Shape, generator: Generator) -> Schedule:
    """The schedule without `make_schedule`'s proof, which takes longer than its use here; tests run the proof."""
    return generator(pipe=shape.pipe, chunks=shape.chunks, num_microbatches=shape.num_microbatches)


@functools.lru_cache(maxsize=64)
def _windows(shape: Shape, generator: Generator) -> Windows:
    make = lambda number: _made(shape._replace(num_microbatches=number), generator)  # noqa: E731
    stages, m = shape.pipe * shape.chunks, shape.num_microbatches
    semantics = make_semantics(shape.semantics, num_stages=stages, batch_size=m)
    return unroll(make(m), semantics, make, spills=shape.spills)
