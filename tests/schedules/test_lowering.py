import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fiddlex.schedules.buffers import IN_TRANSIT
from fiddlex.schedules.generators import GENERATORS
from fiddlex.schedules.lowering import lower
from fiddlex.schedules.schedule import Kind
from fiddlex.schedules.table import COLUMNS, NONE
from fiddlex.schedules.text import from_csv
from fiddlex.schedules.ticks import forward_schedule
from tests.schedules.interpreter import Interpreter
from tests.schedules.strategies import generated_schedules, sizes, user_schedules

ANY_SCHEDULE = st.one_of(user_schedules(), generated_schedules())
FORWARDS = st.builds(lambda schedule, m: forward_schedule(schedule.placement, m), user_schedules(), st.integers(1, 9))


@given(ANY_SCHEDULE, st.booleans())
def test_run_by_hand_every_gradient_is_right_and_added_once(schedule, spills):
    ran = Interpreter(lower(schedule, spills=spills)).run()
    microbatches = range(schedule.num_microbatches)
    once = {(event, k) for event in ("embed", "head", "embed backward") for k in microbatches}
    once |= {("weight gradient", stage, k) for stage in range(schedule.num_stages) for k in microbatches}
    assert ran.counts == dict.fromkeys(once, 1)
    check_order_and_ticks(ran)


@given(FORWARDS)
def test_run_by_hand_forwards_alone_score_every_microbatch_once(schedule):
    lowered = lower(schedule)
    ran = Interpreter(lowered).run()
    once = {(event, k) for event in ("embed", "head") for k in range(schedule.num_microbatches)}
    assert ran.counts == dict.fromkeys(once, 1)
    check_order_and_ticks(ran)
    assert (lowered.stash_slots, lowered.weight_stash_slots, lowered.backward_inbox_slots) == (0, 0, 0)
    assert lowered.backward_shifts == ()


def check_order_and_ticks(ran):
    """The table has each action in the tick it was given, and each kind in the schedule's order."""
    lowered = ran.lowered
    for row, ticks, order in zip(lowered.schedule.actions, lowered.ticks, ran.orders, strict=True):
        assert {action: ran.placed[action] for action in row} == dict(zip(row, ticks, strict=True))
        assert len(order) == len(row)
        for kinds in ({Kind.F}, {Kind.B, Kind.I}, {Kind.W}):
            assert [a for a in order if a.kind in kinds] == [a for a in row if a.kind in kinds]


@given(st.one_of(ANY_SCHEDULE, FORWARDS), st.booleans())
def test_there_are_as_many_slots_as_are_ever_alive_at_once(schedule, spills):
    lowered = lower(schedule, spills=spills)
    ran = Interpreter(lowered).run()
    for name in ("forward_inbox", "backward_inbox", "stash", "weight_stash", "host_stash"):
        memories = getattr(ran, name)
        for memory in memories:
            assert memory.written.keys() == memory.read.keys()  # nothing is kept that nobody needs
        assert getattr(lowered, f"{name}_slots") == max(memory.most_alive() for memory in memories)


@given(ANY_SCHEDULE)
def test_the_table_is_full_of_int32_and_has_no_empty_tick_at_its_end(schedule):
    lowered = lower(schedule)
    width = len(COLUMNS) + len(lowered.forward_shifts) + len(lowered.backward_shifts)
    assert lowered.table.shape == (lowered.num_ticks, schedule.num_ranks, width)
    assert lowered.table.dtype == np.int32
    assert lowered.table.min() >= NONE
    work = [lowered.column(f"{slot}_chunk") for slot in ("forward", "backward", "weight")]
    assert (np.stack(work)[:, -1] != NONE).any()


@given(ANY_SCHEDULE)
def test_shifts_are_the_hops_that_occur(schedule):
    lowered, placement = lower(schedule), schedule.placement
    hops = {(after - before) % schedule.num_ranks for before, after in itertools.pairwise(placement)}
    assert lowered.forward_shifts == tuple(sorted(hops))
    assert lowered.backward_shifts == tuple(sorted(-hop % schedule.num_ranks for hop in hops))


def slots(name, pipe, num_microbatches, chunks=1):
    lowered = lower(GENERATORS[name](pipe=pipe, chunks=chunks, num_microbatches=num_microbatches))
    return lowered.stash_slots, lowered.weight_stash_slots


@given(sizes("1f1b"))
def test_stash_of_1f1b_does_not_grow_with_the_microbatches(asked):
    pipe, m = asked["pipe"], asked["num_microbatches"]
    lowered = lower(GENERATORS["1f1b"](**asked))
    assert (lowered.stash_slots, lowered.weight_stash_slots) == (min(m, 2 * pipe - 1), 0)
    assert lowered.forward_inbox_slots == (pipe > 1)
    assert lowered.backward_inbox_slots == 1
    used = [set(lowered.column("forward_stash")[:, rank]) - {NONE} for rank in range(pipe)]
    assert [len(numbers) for numbers in used] == [min(m, 2 * (pipe - 1 - rank) + 1) for rank in range(pipe)]


@given(sizes("gpipe"))
def test_stash_of_gpipe_holds_every_microbatch(asked):
    assert slots("gpipe", asked["pipe"], asked["num_microbatches"]) == (asked["num_microbatches"], 0)


@given(sizes("interleaved_1f1b"))
def test_stash_of_interleaved_1f1b_is_what_the_paper_holds_on_rank_0(asked):
    """p(1+(p−1)/(pv)) microbatches of v chunks, whatever the microbatches."""
    stash, _ = slots("interleaved_1f1b", asked["pipe"], asked["num_microbatches"], asked["chunks"])
    pipe, v, m = asked["pipe"], asked["chunks"], asked["num_microbatches"]
    assert stash == min(v * m, v * pipe + pipe - 1)


@pytest.mark.parametrize("pipe", range(1, 9))
def test_stash_of_zero_bubble_schedules_is_that_of_the_papers(pipe):
    for m in (2 * pipe - 1, 5 * pipe):
        assert slots("zb_h1", pipe, m) == (pipe, pipe)
        assert slots("zb_h2", pipe, m) == (2 * pipe - 1, 2 * pipe - 1)
        assert slots("zb_v", pipe, m, chunks=2)[0] == 2 * pipe  # chunks, half a rank each
        assert slots("v_half", pipe, m, chunks=2)[0] == 2 * ((pipe + 2) // 2) if m > pipe // 2 else m
        assert slots("v_min", pipe, m, chunks=2)[0] == 2 * min(m, (pipe + 4) // 3)


@given(sizes("dual_pipe_v"))
def test_stash_of_dual_pipe_v_is_what_it_holds_free_running(asked):
    """p + 1/2 microbatches of two chunks, though forwards may run ahead of backwards in lockstep."""
    pipe, m = asked["pipe"], asked["num_microbatches"]
    assert slots("dual_pipe_v", pipe, m, chunks=2)[0] == min(2 * m, 2 * pipe + 1)


@given(ANY_SCHEDULE)
def test_each_spill_has_a_forward_beside_it_and_each_fetch_a_backward(schedule):
    lowered = lower(schedule, spills=True)
    busy = {slot: lowered.column(f"{slot}_chunk") != NONE for slot in ("forward", "backward", "weight")}
    assert not (lowered.column("spill_chunk") != NONE)[~busy["forward"]].any()
    assert not (lowered.column("fetch_chunk") != NONE)[~(busy["backward"] | busy["weight"])].any()


@given(ANY_SCHEDULE)
def test_spills_save_more_slots_than_a_copy_takes_or_there_are_none(schedule):
    without, lowered = lower(schedule), lower(schedule, spills=True)
    spills = (lowered.column("spill_chunk") != NONE).sum(axis=0)
    if lowered.host_stash_slots:
        assert lowered.stash_slots + IN_TRANSIT < without.stash_slots
        used = [1 + without.column("forward_stash")[:, rank].max() for rank in range(schedule.num_ranks)]
        assert [bool(number) for number in spills] == [slots > lowered.stash_slots for slots in used]
    else:
        np.testing.assert_array_equal(lowered.table, without.table)
        assert not spills.any()


@given(sizes("1f1b"))
def test_two_slots_are_enough_for_1f1b_if_it_spills(asked):
    lowered, without = (lower(GENERATORS["1f1b"](**asked), spills=spills) for spills in (True, False))
    Interpreter(lowered).run()
    assert lowered.stash_slots == (2 if without.stash_slots > 3 else without.stash_slots)
    pipe, m = asked["pipe"], asked["num_microbatches"]
    # Rank 0 keeps the value of its first forward, before which it has no backward, and that of its last.
    assert lowered.host_stash_slots == (min(m - 2, 2 * pipe - 3) if without.stash_slots > 3 else 0)


def test_a_table_with_spills_by_hand():
    """GPipe on one rank: the first value and the last stay, the others go by the host."""
    lowered = lower(GENERATORS["gpipe"](pipe=1, chunks=1, num_microbatches=5), spills=True)
    assert (lowered.stash_slots, lowered.host_stash_slots) == (2, 3)
    columns = {
        "forward_microbatch": [0, 1, 2, 3, 4, -1, -1, -1, -1],
        "forward_stash": [0, 1, 1, 1, 1, -1, -1, -1, -1],
        "spill_microbatch": [-1, -1, 1, 2, 3, -1, -1, -1, -1],
        "spill_stash": [-1, -1, 1, 1, 1, -1, -1, -1, -1],
        "spill_host": [-1, -1, 0, 1, 2, -1, -1, -1, -1],
        "fetch_microbatch": [-1, -1, -1, -1, 1, 2, 3, -1, -1],
        "fetch_host": [-1, -1, -1, -1, 0, 1, 2, -1, -1],
        "fetch_stash": [-1, -1, -1, -1, 0, 0, 0, -1, -1],
        "backward_microbatch": [-1, -1, -1, -1, 0, 1, 2, 3, 4],
        "backward_stash": [-1, -1, -1, -1, 0, 0, 0, 0, 1],
    }
    for name, cells in columns.items():
        assert lowered.column(name)[:, 0].tolist() == cells, name


def test_a_table_by_hand():
    """1F1B on two ranks: every column where something happens, and the trash where nothing does."""
    lowered = lower(GENERATORS["1f1b"](pipe=2, chunks=1, num_microbatches=2))
    assert (lowered.forward_shifts, lowered.backward_shifts) == ((1,), (1,))
    assert (lowered.stash_slots, lowered.forward_inbox_slots, lowered.backward_inbox_slots) == (2, 1, 1)
    columns = {
        "embed": [[0, 0], [1, 1], [-1, -1], [-1, -1]],
        "head": [[-1, -1], [0, 0], [1, 1], [-1, -1]],
        "embed_backward": [[-1, -1], [-1, -1], [0, 0], [1, 1]],
        "is_last": [[0, 0], [0, 1], [0, 1], [0, 0]],
        "is_first": [[0, 0], [0, 0], [1, 0], [1, 0]],
        "head_inbox": [[1, 1], [1, 0], [1, 0], [1, 1]],
        "forward_chunk": [[0, -1], [0, 0], [-1, 0], [-1, -1]],
        "forward_microbatch": [[0, -1], [1, 0], [-1, 1], [-1, -1]],
        "forward_inbox": [[-1, -1], [-1, 0], [-1, 0], [-1, -1]],
        "forward_stash": [[0, -1], [1, 0], [-1, 0], [-1, -1]],
        "backward_chunk": [[-1, -1], [-1, 0], [0, 0], [0, -1]],
        "backward_microbatch": [[-1, -1], [-1, 0], [0, 1], [1, -1]],
        "backward_inbox": [[-1, -1], [-1, 0], [0, 0], [0, -1]],
        "backward_stash": [[-1, -1], [-1, 0], [0, 0], [1, -1]],
    }
    for name, cells in columns.items():
        assert lowered.column(name).tolist() == cells, name
    assert (lowered.column("weight_chunk") == NONE).all()
    assert lowered.table[..., -2].tolist() == [[1, 0], [1, 0], [1, 1], [1, 1]]  # activations arrive
    assert lowered.table[..., -1].tolist() == [[1, 1], [1, 1], [0, 1], [0, 1]]  # gradients arrive


def test_a_stage_that_follows_on_its_own_rank_gets_its_input_by_a_hop_of_no_length():
    lowered = lower(from_csv("0F0,1F0,1B0,0B0\n", "one rank"))
    assert lowered.forward_shifts == lowered.backward_shifts == (0,)
    assert lowered.table[:, 0, -2].tolist() == [0, 1, 1]
    assert lowered.column("forward_inbox")[:, 0].tolist() == [NONE, 0, NONE]
