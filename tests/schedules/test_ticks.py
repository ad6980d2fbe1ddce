import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fiddlex.errors import ScheduleError
from fiddlex.schedules.generators import GENERATORS, make_schedule
from fiddlex.schedules.schedule import Action, Kind
from fiddlex.schedules.text import from_csv, to_text
from fiddlex.schedules.ticks import fills_pairs, forward_schedule, moved_ahead, place
from tests.schedules.strategies import generated_schedules, sizes, user_schedules

SLOT = {Kind.F: 0, Kind.B: 1, Kind.I: 1, Kind.W: 2}
ANY_SCHEDULE = st.one_of(user_schedules(), generated_schedules())


def timed_rows(schedule):
    """For each rank its actions with their moments (tick, slot), in the schedule's order."""
    return [
        [(action, (tick, SLOT[action.kind])) for action, tick in zip(row, ticks, strict=True)]
        for row, ticks in zip(schedule.actions, place(schedule), strict=True)
    ]


@given(ANY_SCHEDULE)
def test_an_action_runs_after_what_it_needs_and_hops_take_to_the_next_tick(schedule):
    rows = timed_rows(schedule)
    moments = {action.product: moment for row in rows for action, moment in row}
    for row in rows:
        for action, moment in row:
            for need in action.needs(schedule.num_stages):
                if need.stage == action.stage:
                    assert moments[need] < moment
                else:
                    assert moments[need][0] < moment[0]


@given(ANY_SCHEDULE)
def test_a_rank_runs_at_most_one_action_in_a_slot_and_in_a_tick_if_strict_or_all_backwards_are_split(schedule):
    pairs = fills_pairs(schedule)
    for row in timed_rows(schedule):
        moments = [moment if pairs else moment[0] for _, moment in row]
        assert len(set(moments)) == len(moments)


@given(ANY_SCHEDULE)
def test_only_forwards_move_ahead_and_only_of_backwards(schedule):
    for row in timed_rows(schedule):
        for position, (action, moment) in enumerate(row):
            for earlier, earlier_moment in row[:position]:
                if action.kind is Kind.F and earlier.kind is not Kind.F and fills_pairs(schedule):
                    continue
                assert earlier_moment < moment


@given(ANY_SCHEDULE)
def test_forwards_that_move_ahead_hold_less_than_twice_the_peak(schedule):
    for row in timed_rows(schedule):
        in_order, in_time = most_held(row), most_held(sorted(row, key=lambda pair: pair[1]))
        assert in_time <= 2 * in_order - 1
        if not fills_pairs(schedule):
            assert in_time == in_order


@given(ANY_SCHEDULE)
def test_pairs_are_filled_only_with_whole_backwards_and_never_in_a_strict_schedule(schedule):
    whole = any(action.kind is Kind.B for row in schedule.actions for action in row)
    assert fills_pairs(schedule) == (whole and not schedule.strict)


@given(ANY_SCHEDULE)
def test_what_moved_ahead_is_what_a_sort_by_time_puts_earlier(schedule):
    moved = moved_ahead(schedule, place(schedule))
    for rank, row in enumerate(timed_rows(schedule)):
        before = {action: {earlier for earlier, _ in row[:position]} for position, (action, _) in enumerate(row)}
        in_time = [action for action, _ in sorted(row, key=lambda pair: pair[1])]
        later = {action: set(in_time[position:]) - {action} for position, action in enumerate(in_time)}
        ahead = tuple(action for action, _ in row if before[action] & later[action])
        assert (moved[rank].forwards if rank in moved else ()) == ahead
        if ahead:
            assert moved[rank].passed in before[ahead[0]] & later[ahead[0]]


@pytest.mark.parametrize("pipe", range(1, 7))
def test_1f1b_in_strict_order_holds_what_the_papers_say_in_two_ticks_for_each_microbatch(pipe):
    for m in (1, pipe, 3 * pipe):
        schedule = make_schedule("1f1b", pipe=pipe, num_microbatches=m, order="strict")
        timed = [[(action, (tick, 0)) for action, (tick, _) in row] for row in timed_rows(schedule)]
        assert [most_held(row) for row in timed] == [min(pipe - rank, m) for rank in range(pipe)]
        assert 1 + max(map(max, place(schedule))) == 2 * (m + pipe - 1)


def most_held(row):
    held, most = set(), 0
    for (stage, kind, microbatch), _ in row:
        if kind is Kind.F:
            held.add((stage, microbatch))
        elif kind is not Kind.I:
            held.remove((stage, microbatch))
        most = max(most, len(held))
    return most


@given(ANY_SCHEDULE)
def test_an_action_waits_for_something(schedule):
    """In the tick before its own, an action lacked what it needs, its turn, its slot, or room for one more forward."""
    pairs = fills_pairs(schedule)
    rows = timed_rows(schedule)
    moments = {action.product: moment for row in rows for action, moment in row}
    for row in rows:
        cap = 2 * most_held(row) - 1
        for position, (action, (tick, slot)) in enumerate(row):
            if tick == 0:
                continue
            before = (tick - 1, slot)
            needs = [(need, moments[need]) for need in action.needs(schedule.num_stages)]
            lacking = any(
                moment >= before if need.stage == action.stage else moment[0] >= tick - 1 for need, moment in needs
            )
            ahead = [moment for other, moment in row[:position] if other.kind is Kind.F or action.kind is not Kind.F]
            if not pairs:
                ahead = [(moment[0], slot) for _, moment in row[:position]]
            turn = any(moment >= before for moment in ahead)
            ran = sorted((pair for pair in row if pair[1] < before), key=lambda pair: pair[1])
            held = sum({Kind.F: 1, Kind.I: 0}.get(other.kind, -1) for other, _ in ran)
            full = action.kind is Kind.F and held >= cap
            assert lacking or turn or full


def num_ticks(name, pipe, num_microbatches, chunks=1):
    schedule = GENERATORS[name](pipe=pipe, chunks=chunks, num_microbatches=num_microbatches)
    return 1 + max(map(max, place(schedule)))


@given(sizes("1f1b"))
def test_1f1b_has_the_fewest_ticks_there_can_be(asked):
    """A microbatch goes there and back in 2(p−1) + 1 ticks, and each tick lets one more in."""
    assert (
        num_ticks("1f1b", asked["pipe"], asked["num_microbatches"])
        == 2 * (asked["pipe"] - 1) + asked["num_microbatches"]
    )


@given(sizes("gpipe"))
def test_gpipe_shares_one_tick_between_forwards_and_backwards(asked):
    pipe, m = asked["pipe"], asked["num_microbatches"]
    assert num_ticks("gpipe", pipe, m) == 2 * (pipe - 1) + 2 * m - 1


@given(sizes("interleaved_1f1b"))
def test_interleaved_1f1b_has_1f1bs_ticks_without_a_stall(asked):
    """A microbatch goes through pv stages there and back, and the vm forwards of rank 0 leave no tick empty."""
    pipe, v, m = asked["pipe"], asked["chunks"], asked["num_microbatches"]
    assert num_ticks("interleaved_1f1b", pipe, m, v) == v * m + (v - 1) * pipe + 2 * (pipe - 1)


@pytest.mark.parametrize("pipe", range(1, 9))
def test_zb_h1_and_zb_h2_have_p_minus_1_ticks_above_the_work(pipe):
    """One action a tick, three for each microbatch."""
    for m in (2 * pipe - 1, 2 * pipe, 5 * pipe):
        assert num_ticks("zb_h1", pipe, m) == 3 * m + pipe - 1
        assert num_ticks("zb_h2", pipe, m) == 3 * m + pipe - 1
        assert num_ticks("zb_v", pipe, m, chunks=2) == 6 * m + pipe - 1


@pytest.mark.parametrize("pipe", range(3, 9))
def test_v_half_and_v_min_take_as_many_ticks_as_units_of_time(pipe):
    for m in (pipe, 5 * pipe):
        if m > (pipe + 4) // 3:
            assert num_ticks("v_min", pipe, m, chunks=2) == 6 * m + 4 * pipe - {0: 7, 1: 5, 2: 9}[pipe % 3]
        if m > (pipe + 2) // 2:
            assert num_ticks("v_half", pipe, m, chunks=2) == 6 * m + 3 * pipe - {0: 7, 1: 4}[pipe % 2]


@pytest.mark.parametrize("pipe", range(1, 9))
def test_dual_pipe_v_has_4_ticks_for_a_microbatch_or_2_for_pairs_and_a_longer_way_there_and_back(pipe):
    for m in {1, max(pipe - 1, 1), pipe, pipe + 1, 2 * pipe - 1, 2 * pipe, 5 * pipe}:
        idle = max(4 * pipe - 2 - m, 2 * pipe - 1) - (m < pipe)
        assert num_ticks("dual_pipe_v", pipe, m, chunks=2) == 4 * m + idle
        pairs = make_schedule("dual_pipe_v", pipe=pipe, num_microbatches=m, order="ahead")
        assert 1 + max(map(max, place(pairs))) == 2 * m + 4 * pipe - 2 - (m <= pipe)


def test_a_forward_schedule_passes_all_microbatches_through_all_stages():
    schedule = forward_schedule((0, 1, 1, 0), 5)
    assert " ".join(map(str, schedule.actions[0])) == "0F0 0F1 3F0 3F1 0F2 0F3 3F2 3F3 0F4 3F4"
    assert " ".join(map(str, schedule.actions[1])) == "1F0 1F1 2F0 2F1 1F2 1F3 2F2 2F3 1F4 2F4"
    assert {action for row in schedule.actions for action in row} == {
        Action(stage, Kind.F, k) for stage in range(4) for k in range(5)
    }


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 5))
def test_a_forward_schedule_of_whole_groups_never_stalls(pipe, chunks, groups):
    schedule = forward_schedule(tuple(range(pipe)) * chunks, groups * pipe)
    assert 1 + max(map(max, place(schedule))) == chunks * groups * pipe + pipe - 1


@given(user_schedules(), st.integers(1, 9))
def test_a_forward_schedule_runs_on_any_placement(schedule, num_microbatches):
    forwards = forward_schedule(schedule.placement, num_microbatches)
    ticks = place(forwards)
    counts = collections.Counter(action for row in forwards.actions for action in row)
    assert set(counts.values()) == {1}
    assert len(counts) == schedule.num_stages * num_microbatches
    assert all(len(set(row)) == len(row) for row in ticks)


def test_a_schedule_that_stalls_cannot_be_placed():
    with pytest.raises(ScheduleError, match="deadlock"):
        place(from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", "stalled"))


GOLDEN = {
    ("gpipe", 3, 1, 3): """\
rank    0       1       2       3       4       5       6       7       8
   0   0F0     0F1     0F2      .       .       .      0B0     0B1     0B2
   1    .      1F0     1F1     1F2      .      1B0     1B1     1B2      .
   2    .       .      2F0     2F1   2F2+2B0   2B1     2B2      .       .
""",
    ("1f1b", 3, 1, 4): """\
rank    0       1       2       3       4       5       6       7
   0   0F0     0F1     0F2     0F3     0B0     0B1     0B2     0B3
   1    .      1F0     1F1   1F2+1B0 1F3+1B1   1B2     1B3      .
   2    .       .    2F0+2B0 2F1+2B1 2F2+2B2 2F3+2B3    .       .
""",
    ("interleaved_1f1b", 2, 2, 4): """\
rank    0       1       2       3       4       5       6       7       8       9      10      11
   0   0F0     0F1     2F0     2F1   0F2+2B0 0F3+2B1 2F2+0B0 2F3+0B1   2B2     2B3     0B2     0B3
   1    .      1F0     1F1   3F0+3B0 3F1+3B1 1F2+1B0 1F3+1B1 3F2+3B2 3F3+3B3   1B2     1B3      .
""",
    ("zb_h1", 3, 1, 4): """\
rank  0   1   2   3   4   5   6   7   8   9  10  11  12  13
   0 0F0 0F1 0F2  .   .  0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
   1  .  1F0 1F1  .  1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
   2  .   .  2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3
""",
}


@pytest.mark.parametrize(("name", "pipe", "chunks", "num_microbatches"), GOLDEN)
def test_printed_ticks(name, pipe, chunks, num_microbatches):
    schedule = GENERATORS[name](pipe=pipe, chunks=chunks, num_microbatches=num_microbatches)
    assert to_text(schedule, place(schedule)) == GOLDEN[name, pipe, chunks, num_microbatches]


def test_a_table_with_both_kinds_of_backward_fills_all_three_slots_of_a_tick():
    schedule = from_csv("0F0,0F1,0B0,0F2,0I1,0W1,0B2\n1F0,1B0,1F1,1I1,1F2,1B2,1W1\n", "mixed")
    assert to_text(schedule, place(schedule)) == (
        "rank      0           1           2           3           4\n"
        "   0     0F0         0F1       0F2+0B0     0I1+0W1       0B2\n"
        "   1      .        1F0+1B0     1F1+1I1   1F2+1B2+1W1      .\n"
    )
