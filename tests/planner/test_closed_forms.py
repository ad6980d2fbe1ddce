"""What the planner says of a pipeline without lowering it, against the whole lowering."""

import functools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fiddlex.planner.closed_forms import Shape, batch_seconds, copies_of, free_running_seconds, sizes, stage_ranks
from fiddlex.schedules.generators import GENERATORS, make_schedule
from fiddlex.schedules.lowering import lower
from fiddlex.schedules.pipeline_spec import make_spec
from fiddlex.schedules.semantics import make_semantics
from fiddlex.schedules.ticks import fills_pairs
from fiddlex.schedules.traits import traits_of
from fiddlex.schedules.weight_stream import stream_weights
from fiddlex.schedules.windows import unroll
from fiddlex.simulate.clock import Costs, free_running
from fiddlex.simulate.lockstep import lockstep
from fiddlex.simulate.steady import steady
from fiddlex.simulate.streaming import Copies
from tests.simulate.strategies import stage_costs

TRAITS = {name: traits for name, generator in GENERATORS.items() if (traits := traits_of(generator))}
FLUSHED_OR_NOT = [name for name in TRAITS if not TRAITS[name].chunk_major]
NEVER_WAIT = [name for name in TRAITS if TRAITS[name].never_waits]


@st.composite
def shapes(draw, names=tuple(TRAITS), semantics=("sync",), ranks=(1, 6)):
    """Short and long pipelines of every schedule that has traits."""
    name = draw(st.sampled_from(names))
    pipe, chunks = draw(st.integers(*ranks)), draw(st.sampled_from(TRAITS[name].chunks[:2]))
    least, period = pipe if semantics == ("2bw",) else 1, TRAITS[name].period(pipe)
    m = max(draw(st.integers(least, 6 * pipe)) // period, 1) * period
    streamed = draw(st.integers(0, 4)) if TRAITS[name].chunk_major else 0
    return Shape(name, pipe, chunks, m, draw(st.sampled_from(semantics)), draw(st.booleans()), streamed)


def lowered(shape):
    schedule = make_schedule(shape.schedule, pipe=shape.pipe, chunks=shape.chunks, num_microbatches=shape[3])
    return lower(schedule, spills=shape.spills)


@settings(max_examples=200)
@given(shapes())
@example(Shape("gpipe", 3, 1, 5))
@example(Shape("gpipe", 1, 1, 5))
@example(Shape("interleaved_1f1b", 4, 1, 8))
@example(Shape("interleaved_1f1b", 6, 3, 36, spills=True))
@example(Shape("zb_h2", 6, 1, 36, spills=True))
def test_traits_are_those_of_the_lowering(shape):
    stream = stream_weights(lowered(shape), rows_per_chunk=shape.streamed) if shape.streamed else None
    assert sizes(shape) == make_spec(lowered(shape), shape.num_microbatches, stream=stream).sizes
    assert stage_ranks(shape) == lowered(shape).schedule.placement
    assert shape.traits.splits_backward == lowered(shape).schedule.split_backward
    if not fills_pairs(lowered(shape).schedule):
        actions = max(map(len, lowered(shape).schedule.actions))
        idle = shape.traits.idle_ticks(shape.pipe, shape.chunks, shape.num_microbatches)
        assert idle <= lowered(shape).num_ticks - actions


@settings(max_examples=200)
@given(shapes(), st.data())
def test_a_batch_takes_as_long_as_simulated_whole(shape, data):
    costs = data.draw(stage_costs(shape.pipe * shape.chunks))
    stream = stream_weights(lowered(shape), rows_per_chunk=shape.streamed) if shape.streamed else None
    assert batch_seconds(shape, costs) == pytest.approx(lockstep(lowered(shape), costs, stream).makespan, rel=1e-12)


@settings(max_examples=100)
@given(shapes(("breadth_first",)), st.data())
def test_a_batch_whose_weights_come_from_the_host_takes_as_long_as_simulated_whole(shape, data):
    shape = shape._replace(streamed=data.draw(st.integers(1, 6)), num_microbatches=data.draw(st.integers(1, 40)))
    stream = stream_weights(lowered(shape), rows_per_chunk=shape.streamed)
    assert copies_of(shape) == Copies.of(stream)
    costs = data.draw(stage_costs(shape.pipe * shape.chunks))
    assert batch_seconds(shape, costs) == pytest.approx(lockstep(lowered(shape), costs, stream).makespan, rel=1e-12)


@settings(max_examples=60)
@given(st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b"]), st.integers(1, 4), st.integers(1, 24), st.data())
def test_other_systems_batches_take_as_long_as_simulated_whole(name, pipe, m, data):
    """Of stages that are alike, with hops far shorter than they are: others may take longer to settle."""
    chunks = 2 if name == "interleaved_1f1b" else 1
    m = m * pipe if chunks > 1 else m
    costs = Costs(*(data.draw(st.floats(0.25, 2)) for _ in range(3)), hop=data.draw(st.floats(0, 0.02)))
    shape = Shape(name, pipe, chunks, m)
    schedule = make_schedule(name, pipe=pipe, chunks=chunks, num_microbatches=m)
    expected = free_running(schedule, costs).makespan
    assert free_running_seconds(shape, costs) == pytest.approx(expected, rel=1e-12, abs=1e-12)


@settings(max_examples=60)
@given(shapes(tuple(NEVER_WAIT), ("2bw",)), st.data())
def test_a_pipeline_that_is_not_flushed_takes_as_long_as_unrolled(shape, data):
    make = functools.partial(make_schedule, shape.schedule, pipe=shape.pipe, chunks=shape.chunks)
    batch = make(num_microbatches=shape.num_microbatches)
    semantics = make_semantics("2bw", num_stages=batch.num_stages, batch_size=shape.num_microbatches)
    windows = unroll(batch, semantics, lambda number: make(num_microbatches=number), spills=shape.spills)
    costs = data.draw(stage_costs(batch.num_stages))
    assert sizes(shape) == windows.sizes
    assert batch_seconds(shape, costs) == pytest.approx(steady(windows, costs).period, rel=1e-12, abs=1e-12)


@pytest.mark.long
@settings(max_examples=60)
@given(shapes(FLUSHED_OR_NOT, ("2bw", "stash", "vertical_sync", "delay:2"), ranks=(2, 4)), st.data())
def test_a_batch_of_any_semantics_takes_as_long_as_unrolled(shape, data):
    name, pipe, chunks, m, semantics, spills, _ = shape
    make = functools.partial(make_schedule, name, pipe=pipe, chunks=chunks)
    lagging = make_semantics(semantics, num_stages=pipe * chunks, batch_size=m)
    windows = unroll(make(num_microbatches=m), lagging, lambda number: make(num_microbatches=number), spills=spills)
    costs = data.draw(stage_costs(pipe * chunks))
    expected = steady(windows, costs).period
    assert sizes(shape) == windows.sizes
    assert batch_seconds(shape, costs) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_a_rank_has_as_many_stages_as_are_searched():
    for name, traits in TRAITS.items():
        for chunks in traits.chunks:
            schedule = make_schedule(name, pipe=2, chunks=chunks, num_microbatches=2 * traits.period(2))
            assert {len(schedule.stages_of(rank)) for rank in range(2)} == {chunks}


def test_a_long_deep_pipeline_takes_no_longer_than_its_length_says():
    assert batch_seconds(Shape("1f1b", 32, 1, 4096), Costs()) == 3 * (4096 + 31)
