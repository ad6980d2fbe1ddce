"""Windows run one after another, with slots renamed between them, are one long pipeline that reads what it should."""

import dataclasses

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fiddlex.errors import ConfigError, ScheduleError
from fiddlex.schedules.generators import GENERATORS, make_schedule
from fiddlex.schedules.semantics import make_phases, make_semantics
from fiddlex.schedules.table import COLUMNS, NONE
from fiddlex.schedules.windows import repeat, unroll
from tests.schedules.interpreter import Interpreter
from tests.schedules.strategies import generated_schedules, user_schedules

SEMANTICS = st.sampled_from(["sync", "2bw", "stash", "vertical_sync", "delay:2", "delay:5"])
NAMES = tuple(GENERATORS)
SLOTS = {
    "forward_inbox": ["forward_inbox"],
    "backward_inbox": ["head_inbox", "backward_inbox"],
    "stash": ["forward_stash", "backward_stash", "weight_stash", "spill_stash", "fetch_stash"],
    "weight_stash": ["backward_left", "weight_left"],
    "host_stash": ["spill_host", "fetch_host"],
}
VERSIONS = {"forward_version": "forward", "backward_version": "backward", "weight_version": "weight"}


def unrolled(schedule, semantics, *, spills=False):
    """The windows of a schedule; of a generated one, of the better of its two forms."""
    longer = None
    if schedule.name in NAMES:
        sizes = {"pipe": schedule.num_ranks, "chunks": schedule.num_chunks}
        longer = lambda number: make_schedule(schedule.name, **sizes, num_microbatches=number)  # noqa: E731
    size = schedule.num_microbatches
    return unroll(
        schedule, make_semantics(semantics, num_stages=schedule.num_stages, batch_size=size), longer, spills=spills
    )


@given(st.one_of(user_schedules(), generated_schedules()), SEMANTICS, st.booleans())
def test_run_by_hand_every_read_is_right(schedule, name, spills):
    try:
        windows = unrolled(schedule, name, spills=spills)
    except ScheduleError:
        assume(False)
    semantics, size = windows.semantics, schedule.num_microbatches
    num_steps = len(windows.first) + 2 * len(windows.cycle) + 1
    tables, slots = [], []
    for call in range(num_steps):
        window = windows[call]
        check_versions(window.table, schedule, semantics)
        slots = slots or [np.tile(np.arange(rename.shape[1]), (len(rename), 1)) for rename in window.renames]
        tables.append(absolute(window.table, call * size, windows.lowered, slots))
        slots = [np.take_along_axis(now, rename, 1) for now, rename in zip(slots, window.renames, strict=True)]
    ran = Interpreter(dataclasses.replace(windows.lowered, table=np.concatenate(tables))).run()
    done = range(num_steps * size)
    counts = {event: count for event, count in ran.counts.items() if event[-1] in done}
    once = {(event, k) for event in ("embed", "head", "embed backward") for k in done}
    once |= {("weight gradient", stage, k) for stage in range(schedule.num_stages) for k in done}
    assert counts == dict.fromkeys(once, 1)  # all gradients of a step's batch exist when it ends


def check_versions(table, schedule, semantics):
    """Batch b of a stage uses W(b − delay), and no weights that are not there yet."""
    for rank in range(schedule.num_ranks):
        for column, slot in VERSIONS.items():
            chunks, microbatches, ages = (
                table[:, rank, COLUMNS[f"{slot}_{name}"]] for name in ("chunk", "microbatch", "version")
            )
            for chunk, microbatch, age in zip(chunks, microbatches, ages, strict=True):
                if chunk != NONE:
                    stage = schedule.stages_of(rank)[chunk]
                    assert age == semantics.delays[stage] - microbatch // semantics.batch_size, column
                    assert 0 <= age < semantics.num_versions


def absolute(table, first, lowered, slots):
    """A window's table with microbatches counted from the first of all, and slots as they lie."""
    table = table.copy()
    slots_of_a_tick = (*VERSIONS.values(), "spill", "fetch")
    for name in ("embed", "head", "embed_backward", *(f"{slot}_microbatch" for slot in slots_of_a_tick)):
        column = table[..., COLUMNS[name]]
        column[column != NONE] += first
    for name in VERSIONS:
        column = table[..., COLUMNS[name]]
        column[column != NONE] = 0
    places = dict(zip(SLOTS, slots, strict=True))
    for memory, columns in SLOTS.items():
        for name in columns:
            rename(table[..., COLUMNS[name]], places[memory])
    arrivals = table[..., len(COLUMNS) :]
    for number in range(arrivals.shape[-1]):
        memory = "forward_inbox" if number < len(lowered.forward_shifts) else "backward_inbox"
        rename(arrivals[..., number], places[memory])
    return table


def rename(column, places):
    for rank in range(column.shape[1]):
        busy = column[:, rank] != NONE
        column[busy, rank] = places[rank][column[busy, rank]]


@pytest.mark.parametrize(
    ("name", "pipe", "chunks", "microbatches", "first", "cycle"),
    [
        ("1f1b", 2, 1, 2, [4], [2]),
        ("1f1b", 4, 1, 8, [14], [8]),  # m + 2(p − 1), then m
        ("1f1b", 4, 1, 6, [12], [6]),  # the least that needs no stall
        ("1f1b", 4, 1, 5, [11], [5, 6]),
        ("interleaved_1f1b", 4, 2, 8, [26], [16]),
        ("zb_h1", 4, 1, 8, [33], [24]),  # one action a tick: 3m
        ("zb_v", 4, 2, 8, [64], [48]),
    ],
)
def test_ticks_of_2bw(name, pipe, chunks, microbatches, first, cycle):
    windows = unrolled(make_schedule(name, pipe=pipe, chunks=chunks, num_microbatches=microbatches), "2bw")
    assert [len(window.table) for window in windows.first] == first
    assert [len(window.table) for window in windows.cycle] == cycle


@pytest.mark.parametrize("pipe", [1, 2, 3, 5, 8])
def test_2bw_never_idles_from_twice_the_ranks_less_one_on(pipe):
    for microbatches in range(max(2 * (pipe - 1), 1), 3 * pipe):
        windows = unrolled(make_schedule("1f1b", pipe=pipe, num_microbatches=microbatches), "2bw")
        assert windows.period == microbatches
        for window in windows.cycle:
            assert (window.table[..., COLUMNS["forward_chunk"]] != NONE).all()
            assert (window.table[..., COLUMNS["backward_chunk"]] != NONE).all()


@given(st.integers(1, 8), st.integers(1, 20))
def test_2bw_takes_two_versions_and_one_sum_of_a_chunks_gradient(pipe, more):
    windows = unrolled(make_schedule("1f1b", pipe=pipe, num_microbatches=pipe + more), "2bw")
    sizes = windows.sizes
    assert (sizes.versions, sizes.sums, sizes.finished) == (2, 1, 1)
    assert max(sizes.batches, sizes.outer_sums) <= 2
    assert sizes.slots.stash == min(2 * pipe - 1, 2 * (pipe + more))


@given(st.integers(3, 8), st.integers(0, 20))
def test_2bw_spills_as_a_flushed_batch_does(pipe, more):
    schedule = make_schedule("1f1b", pipe=pipe, num_microbatches=2 * pipe + more)
    windows = unrolled(schedule, "2bw", spills=True)
    assert windows.sizes.slots[2:] == (2, 0, 2 * pipe - 3 + 1)  # with the trash
    assert windows.period == schedule.num_microbatches


def test_calls_are_shown_as_far_as_they_were_unrolled():
    schedule = make_schedule("1f1b", pipe=2, num_microbatches=2)
    semantics = make_semantics("2bw", num_stages=2, batch_size=2)
    assert unroll(schedule, semantics, num_steps=40).over(40).num_ticks == 4 + 39 * 2
    with pytest.raises(ValueError, match="40 steps asked"):
        unroll(schedule, semantics).over(40)


def test_the_last_window_of_a_run_starts_nothing_of_the_next_batch():
    window = unrolled(make_schedule("1f1b", pipe=4, num_microbatches=8), "2bw").cycle[0]
    assert (window.table[..., COLUMNS["forward_microbatch"]] >= 8).any()
    table = window.until(8)
    for name in ("embed", "head", "embed_backward", "forward_microbatch", "backward_microbatch"):
        assert (table[..., COLUMNS[name]] < 8).all()
        own = window.table[..., COLUMNS[name]] < 8
        np.testing.assert_array_equal(table[..., COLUMNS[name]][own], window.table[..., COLUMNS[name]][own])
    idle = table[..., COLUMNS["forward_microbatch"]] == NONE
    assert (table[..., COLUMNS["forward_chunk"]][idle] == NONE).all()


def test_delays_are_those_of_the_papers():
    delays = lambda name: make_semantics(name, num_stages=4, batch_size=1).delays  # noqa: E731
    assert delays("sync") == (0, 0, 0, 0)
    assert delays("2bw") == (1, 1, 1, 1)
    assert delays("stash") == (3, 2, 1, 0)
    assert delays("vertical_sync") == (3, 3, 3, 3)
    assert delays("delay:2") == (2, 2, 2, 2)
    with pytest.raises(ConfigError, match="Did you mean '2bw'"):
        delays("2wb")


def test_phases_follow_one_another():
    assert make_phases("2bw", "", 100) == (("2bw", 0, 100),)
    assert make_phases("sync", "sync:0.2,2bw", 100) == (("sync", 0, 20), ("2bw", 20, 100))
    assert make_phases("sync", "sync:5, delay:3:.5,sync", 100) == (
        ("sync", 0, 5),
        ("delay:3", 5, 55),
        ("sync", 55, 100),
    )
    for wrong in ("sync,2bw", "sync:0.2,", "sync:2.5,2bw", "sync:100,2bw", "sync:0.7,2bw:0.7,sync", "sync:x,2bw"):
        with pytest.raises(ConfigError, match=r"as in sync:0\.2,2bw"):
            make_phases("sync", wrong, 100)


def test_a_repeated_schedule_counts_its_microbatches_through():
    schedule = make_schedule("1f1b", pipe=2, num_microbatches=2)
    assert [str(action) for action in repeat(schedule, 2).actions[1]] == (
        ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2", "1F3", "1B3"]
    )
