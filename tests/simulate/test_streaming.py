"""Batches whose weights come from the host in the lockstep clock: worked out by hand, and what holds of all."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fiddlex.schedules.generators import make_schedule
from fiddlex.schedules.lowering import lower
from fiddlex.schedules.ticks import forward_schedule
from fiddlex.schedules.weight_stream import stream_weights
from fiddlex.simulate.clock import Costs
from fiddlex.simulate.lockstep import describe, lockstep
from tests.simulate.strategies import stage_costs


def run(costs, *, pipe=1, chunks=3, microbatches=2, rows=1, spills=False):
    schedule = make_schedule("breadth_first", pipe=pipe, chunks=chunks, num_microbatches=microbatches)
    lowered = lower(schedule, spills=spills)
    return lockstep(lowered, costs, stream_weights(lowered, rows_per_chunk=rows))


def test_one_rank_by_hand():
    """Periods of two ticks, without copies F F, F F, F F+B, B B, B B and B and an idle tick, for a B of 2."""
    timeline = run(Costs(load=3.0, store=1.0))
    assert timeline.tick_starts == (3, 4, 6, 7, 9, 10, 13, 15, 17, 19, 21, 23)
    assert timeline.makespan == 25  # three until the first weights are there, and one for the last gradients
    assert timeline.ideal == 18
    assert timeline.bubble == 7
    assert run(Costs(load=1.0, store=3.0)).makespan == 25
    assert run(Costs(load=1.0, store=5.0)).makespan == 1 + 6 * 5 + 5
    assert run(Costs(load=2.0, store=2.0)).makespan == 2 + 18 + 2  # as long as two forward passes
    assert run(Costs(load=3.0, tick=0.5)).makespan == 3 + 12 * 0.5 + 18  # an idle tick takes 0.5 too


def test_chunks_of_several_rows_by_hand():
    """Transfers of two rows in each tick, where a chunk of three rows has two ticks to come."""
    timeline = run(Costs(load=1.0, store=1.0), rows=3)
    assert timeline.makespan == 3 + 5 * 2 + 3 + 5 * 2 + 3


def test_two_ranks_by_hand():
    """A period is two ticks; rank 1 begins one tick later and turns around in the seventh tick."""
    timeline = run(Costs(load=4.0), pipe=2)
    assert timeline.tick_starts == (4, 5, 8, 9, 12, 13, 16, 19, 21, 23, 25, 27, 29, 31)
    assert timeline.makespan == 33
    assert run(Costs(load=2.0), pipe=2).makespan - 2 == run(Costs(), pipe=2).makespan == 6 + 3 + 6 * 2 + 0


def test_what_forwards_save_crosses_the_same_link():
    """A tick copies for 0.5 each way, beside a forward pass of 1 and, where there is one, a backward pass of 2."""
    alone, both = (run(Costs(load=load, spill=0.5), spills=True) for load in (0.0, 3.0))
    assert [b - a for a, b in zip(alone.tick_starts[:4], alone.tick_starts[1:5], strict=True)] == [1.5] * 4
    assert alone.makespan == 5 * 1.5 + 3 + 5 * 2.5 + 1
    assert both.makespan == 3 + 2 * 4 + (1.5 + 3) + 2 * 5 + 4  # a transfer takes 3, and the copies of two ticks 1 more


def test_forward_passes_alone_store_nothing():
    lowered = lower(forward_schedule((0, 0, 0), 2, chunk_major=True))
    timeline = lockstep(lowered, Costs(load=1.0, store=9.0), stream_weights(lowered, rows_per_chunk=1))
    assert timeline.makespan == 1 + 6


sizes = {
    "pipe": st.integers(1, 4),
    "chunks": st.integers(3, 5),
    "microbatches": st.integers(1, 9),
    "rows": st.integers(1, 4),
    "spills": st.booleans(),
}


@given(st.fixed_dictionaries(sizes), st.data())
def test_copies_only_lengthen_a_batch_and_the_ends_always_do(sizes, data):
    costs = data.draw(stage_costs(sizes["pipe"] * sizes["chunks"]))
    fast = dataclasses.replace(costs, load=0.0, store=0.0)
    timeline, without = run(costs, **sizes), run(fast, **sizes)
    schedule, rows = without.schedule, sizes["rows"]
    lowered = lower(schedule, spills=sizes["spills"])
    stream, ends = stream_weights(lowered, rows_per_chunk=rows), rows * (costs.load + costs.store)
    assert timeline.makespan >= without.makespan + ends
    assert timeline.makespan >= stream.rows * len(stream.loads) * max(costs.load, costs.store) + ends
    idle = len(stream.loads) * stream.period - lowered.num_ticks  # the executor runs whole periods
    spill = 2 * costs.spill if lowered.host_stash_slots else 0
    assert without.makespan == lockstep(lowered, fast).makespan + idle * (costs.tick + spill)
    assert timeline.work == without.work
    if stream.rows * max(costs.load, costs.store) == 0 or costs.tick / 2 >= stream.rows * max(costs.load, costs.store):
        assert timeline.makespan == without.makespan + ends


@pytest.mark.parametrize("microbatches", [4, 16, 64])
def test_a_slow_link_takes_as_long_for_any_number_of_microbatches(microbatches):
    """As long as twice the 6 chunks of 4 rows, or a row less with a transfer in each of 47 ticks, and the ends."""
    timeline = run(Costs(load=1e3, store=1e3), pipe=1, chunks=6, microbatches=microbatches, rows=4)
    assert timeline.makespan == 1e3 * (2 * 6 * 4 - (microbatches == 4) + 2 * 4)


@pytest.mark.parametrize(
    ("rows", "microbatches", "expected"),
    [
        (1, 4, "the weights of 2 of 3 chunks on a device, to which 1 layer may come every 4 ticks"),
        (4, 4, "the weights of 2 of 3 chunks on a device, to which 1 layer may come every tick"),
        (4, 2, "the weights of 2 of 3 chunks on a device, to which 2 layers may come every tick"),
    ],
)
def test_the_line_of_a_log_tells_what_a_device_holds(rows, microbatches, expected):
    lowered = lower(make_schedule("breadth_first", pipe=2, chunks=3, num_microbatches=microbatches), spills=True)
    stream = stream_weights(lowered, rows_per_chunk=rows)
    text = describe(lowered, num_layers=[rows] * 6, stream=stream)
    assert text.endswith(
        f"2 forward passes of a stage stashed on a rank and {3 * microbatches - 2} on its host, {expected}"
    )
    assert "weights" not in describe(lowered, num_layers=[rows] * 6)
