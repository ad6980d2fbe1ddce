"""The transfers of weights and gradients, stepped through tick by tick on buffers of row numbers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fiddlex.errors import ScheduleError
from fiddlex.schedules.generators import make_schedule
from fiddlex.schedules.lowering import Lowered, lower
from fiddlex.schedules.schedule import Action, Kind, Schedule
from fiddlex.schedules.table import NONE
from fiddlex.schedules.ticks import forward_schedule
from fiddlex.schedules.weight_stream import WeightStream, stream_weights, transfer_of

MANY = 1000


def breadth_first(pipe: int, chunks: int, microbatches: int) -> Lowered:
    return lower(make_schedule("breadth_first", pipe=pipe, chunks=chunks, num_microbatches=microbatches))


def step_through(lowered: Lowered, stream: WeightStream, rank: int, rows: int) -> np.ndarray:
    """Runs one rank as the executor does.

    Returns:
      For each row, the chunk whose gradient is on the host, times `MANY`, plus the number of its microbatches.
    """
    chunks = len(lowered.schedule.stages_of(rank))
    place = [*range(rows), *[NONE] * rows]  # the row whose weights are in each place
    sums, leaving = np.zeros(rows, int), np.full(rows, NONE)
    host = np.full(rows * chunks, NONE)
    forwards, backwards, finishes = (
        lowered.column(name)[:, rank] for name in ("forward_chunk", "backward_chunk", "backward_finishes")
    )
    loads, stores = stream.loads[:, rank], stream.early_stores[:, rank]
    for period in range(len(loads)):
        arriving = np.arange(stream.rows) + loads[period] if loads[period] != NONE else ()
        going = np.arange(stream.rows) + stores[period]
        host[going] = leaving[going % rows]
        for tick in range(period * stream.period, min((period + 1) * stream.period, lowered.num_ticks)):
            for chunk in (forwards[tick], backwards[tick]):
                if chunk != NONE:
                    wanted = range(chunk * rows, (chunk + 1) * rows)
                    assert [place[row % (2 * rows)] for row in wanted] == [*wanted]
            if backwards[tick] != NONE:
                sums += 1
            if finishes[tick] == 1:
                leaving, sums = MANY * backwards[tick] + sums, np.zeros(rows, int)
        for row in arriving:
            place[row % (2 * rows)] = row
    host[:rows] = leaving
    return host


@given(pipe=st.integers(1, 4), chunks=st.integers(3, 6), microbatches=st.integers(1, 12), rows=st.integers(1, 5))
def test_weights_are_there_when_they_are_used_and_each_gradient_goes_once(
    pipe: int, chunks: int, microbatches: int, rows: int
) -> None:
    lowered = breadth_first(pipe, chunks, microbatches)
    stream = stream_weights(lowered, rows_per_chunk=rows)
    for rank in range(pipe):
        expected = np.repeat(MANY * np.arange(chunks) + microbatches, rows)
        assert step_through(lowered, stream, rank, rows).tolist() == expected.tolist()
        loads, stores = (each[:, rank][each[:, rank] != NONE] for each in (stream.loads, stream.stores))
        assert np.unique(loads // rows, return_counts=True)[0].tolist() == [*range(chunks)]
        per_chunk = -(-rows // stream.rows)
        assert len(loads) == (2 * chunks - 3) * per_chunk  # without chunk 0's first
        assert len(stores) == (chunks - 1) * per_chunk


@given(pipe=st.integers(1, 4), chunks=st.integers(3, 5), microbatches=st.integers(1, 9), rows=st.integers(1, 4))
def test_forward_passes_alone_need_each_chunk_once(pipe: int, chunks: int, microbatches: int, rows: int) -> None:
    lowered = lower(forward_schedule(tuple(range(pipe)) * chunks, microbatches, chunk_major=True))
    stream = stream_weights(lowered, rows_per_chunk=rows)
    assert (stream.stores == NONE).all()
    for rank in range(pipe):
        step_through(lowered, stream, rank, rows)
        loaded = stream.loads[:, rank]
        assert np.count_nonzero(loaded != NONE) == (chunks - 1) * -(-rows // stream.rows)


@pytest.mark.parametrize(
    ("rows", "microbatches", "transfer", "period"),
    [(4, 4, 1, 1), (4, 8, 1, 2), (4, 2, 2, 1), (4, 1, 2, 1), (1, 6, 1, 6), (4, 7, 2, 3), (3, 8, 1, 2)],
)
def test_a_chunk_passes_in_as_many_ticks_as_it_has_microbatches(
    rows: int, microbatches: int, transfer: int, period: int
) -> None:
    stream = stream_weights(breadth_first(2, 4, microbatches), rows_per_chunk=rows)
    assert (stream.rows, stream.period) == (transfer, period) == transfer_of(rows, max(microbatches, 2))


@pytest.mark.parametrize("microbatches", [4, 16, 64])
def test_the_number_of_rows_that_cross_the_link_does_not_depend_on_the_microbatches(microbatches: int) -> None:
    pipe, chunks, rows = 2, 6, 4
    stream = stream_weights(breadth_first(pipe, chunks, microbatches), rows_per_chunk=rows)
    copied = stream.rows * len(stream.loads)  # with the copies that repeat others
    assert 2 * chunks * rows <= copied <= 2 * chunks * rows + 2  # the pipeline fills and drains in two periods at most


def named(name: str, chunks: int) -> Schedule:
    return make_schedule(name, pipe=2, chunks=chunks, num_microbatches=4)


def with_split_backward() -> Schedule:
    """Breadth-first, in which stage 0 splits the backward pass of its last microbatch."""
    (*first, last), second = named("breadth_first", 3).actions
    assert last == Action(0, Kind.B, 3)
    rows = ((*first, last._replace(kind=Kind.I), last._replace(kind=Kind.W)), second)
    return Schedule("split", rows, named("breadth_first", 3).placement)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (
            named("1f1b", 1),
            r"1f1b has 1 chunk on rank 0: a device holds the weights of two chunks, and with fewer than",
        ),
        (named("breadth_first", 2), r"breadth_first has 2 chunks on rank 0: .* Use breadth_first with 3 chunks or mo"),
        (named("interleaved_1f1b", 3), r"interleaved_1f1b is not chunk-major on rank 0: .* Use breadth_first, or lea"),
        (with_split_backward(), r"schedule split splits backward passes into I and W: weights can only come from the"),
    ],
)
def test_other_schedules_are_refused(schedule: Schedule, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        stream_weights(lower(schedule), rows_per_chunk=1)
