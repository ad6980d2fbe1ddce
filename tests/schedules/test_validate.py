import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fiddlex.errors import ScheduleError
from fiddlex.schedules.generators import GENERATORS
from fiddlex.schedules.schedule import Action, Kind, Schedule
from fiddlex.schedules.text import from_csv
from fiddlex.schedules.validate import validate
from tests.schedules.strategies import generated_schedules, is_legal, user_schedules

FUSED = """\
0F0,0F1,0B0,0B1
1F0,1B0,1F1,1B1
"""
SPLIT = """\
0F0,0I0,0W0
1F0,1I0,1W0
"""


def failure(schedule):
    with pytest.raises(ScheduleError) as error:
        validate(schedule)
    return str(error.value)


def edited(text, old, new):
    assert text.count(old) == 1
    return from_csv(text.replace(old, new), "t")


@given(st.one_of(user_schedules(), generated_schedules()))
def test_legal_schedules_pass_and_come_back(schedule):
    assert is_legal(schedule.actions, schedule.placement, schedule.num_microbatches)
    assert validate(schedule) is schedule


@given(st.one_of(user_schedules(), generated_schedules()), st.data())
def test_a_mutated_table_is_refused_exactly_when_it_is_illegal(schedule, data):
    rows = [list(row) for row in schedule.actions]
    for _ in range(data.draw(st.integers(1, 2))):
        rank = data.draw(st.sampled_from([rank for rank, row in enumerate(rows) if row]))
        row = rows[rank]
        at, to = (data.draw(st.integers(0, len(row) - 1)) for _ in range(2))
        mutations = ["swap", "move", "drop", "duplicate", "other rank", "stage", "kind", "microbatch"]
        match data.draw(st.sampled_from(mutations)):
            case "swap":
                row[at], row[to] = row[to], row[at]
            case "move":
                row.insert(to, row.pop(at))
            case "drop":
                del row[at]
            case "duplicate":
                row.insert(to, row[at])
            case "other rank":
                rows[data.draw(st.integers(0, len(rows) - 1))].append(row.pop(at))
            case "stage":
                row[at] = row[at]._replace(stage=data.draw(st.integers(0, schedule.num_stages)))
            case "kind":
                row[at] = row[at]._replace(kind=data.draw(st.sampled_from(Kind)))
            case "microbatch":
                row[at] = row[at]._replace(microbatch=data.draw(st.integers(0, schedule.num_microbatches)))
        if not any(rows):
            break
    mutated = dataclasses.replace(schedule, actions=tuple(map(tuple, rows)))
    num_microbatches = max((action.microbatch + 1 for row in rows for action in row), default=1)
    if is_legal(rows, schedule.placement, num_microbatches):
        validate(mutated)
    else:
        message = failure(mutated)
        assert not any(rows) or (">" in message and "<" in message)


def test_an_action_on_another_rank_than_its_stages():
    assert failure(from_csv("0F0,0F1,0B0,1B1,0B1\n1F0,1B0,1F1\n", "t")) == (
        "schedule t: 1B1 at position 3 of rank 0: stage 1 is placed on rank 1, and all its actions run there. "
        "Move it to rank 1.\n"
        "rank 0  0F0  0F1  0B0 >1B1< 0B1\n"
        "rank 1  1F0  1B0  1F1"
    )


def test_an_action_that_runs_twice():
    assert failure(edited(FUSED, "1F1,", "1F1,1B0,")) == (
        "schedule t: 1B0 at position 3 of rank 1: each action runs once, and this one is already at position 1. "
        "Take one out.\n"
        "rank 0  0F0  0F1  0B0  0B1\n"
        "rank 1  1F0  1B0  1F1 >1B0< 1B1"
    )


@pytest.mark.parametrize(
    ("text", "old", "new", "culprit", "rival"),
    [
        (FUSED, "1F1,", "1F1,1I0,", "1I0", "1B0"),
        (FUSED, "1F1,", "1F1,1W0,", "1W0", "1B0"),
        (SPLIT, "1W0", "1W0,1B0", "1B0", "1I0"),
        (SPLIT, "1I0,1W0", "1W0,1B0", "1B0", "1W0"),
    ],
)
def test_a_backward_that_is_both_whole_and_split(text, old, new, culprit, rival):
    message = failure(edited(text, old, new))
    assert f"B is I and W in one, and {rival} is already at position 1. Keep either 1B0, or 1I0 and 1W0." in message
    assert f">{culprit}<" in message


@pytest.mark.parametrize(
    ("text", "gone", "missing", "rule"),
    [
        (FUSED, "1F0,", "1F0", "each stage runs each microbatch forward"),
        (FUSED, ",0B0", "0B0", "each forward has a backward: B, or I and W"),
        (SPLIT, "1I0,", "1I0", "each forward has a backward: B, or I and W"),
        (SPLIT, ",0W0", "0W0", "0I0 gives no weight gradient"),
    ],
)
def test_an_action_that_is_missing(text, gone, missing, rule):
    message = failure(edited(text, gone, ""))
    count = 2 if text == FUSED else 1
    assert message.startswith(
        f"schedule t: {missing} is missing: {rule} (there are {count} microbatches). "
        f"Add it to rank {missing[0]}, which holds stage {missing[0]}.\n"
    )
    assert message.splitlines()[1 + int(missing[0])].endswith(f">{missing}?<")


@pytest.mark.parametrize(
    ("text", "old", "new", "rule"),
    [
        (FUSED, "1F0,1B0", "1B0,1F0", "a backward comes after its forward. Move it behind 1F0."),
        (SPLIT, "1F0,1I0", "1I0,1F0", "a backward comes after its forward. Move it behind 1F0."),
        (SPLIT, "1I0,1W0", "1W0,1I0", "W comes after I. Move it behind 1I0."),
    ],
)
def test_an_action_ahead_of_what_it_needs_on_its_stage(text, old, new, rule):
    message = failure(edited(text, old, new))
    assert rule in message
    assert f">{new[:3]}<" in message


def test_a_deadlock_marks_every_head_and_says_what_each_waits_for():
    schedule = from_csv("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n2F0,2F1,2B1,2B0\n3F0,3B0,3F1,3B1\n", "t")
    assert validate(schedule)
    schedule = from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n2F0,2F1,2B1,2B0\n3F0,3B0,3F1,3B1\n", "t")
    assert failure(schedule) == (
        "schedule t: deadlock: each rank runs its list in order, and 4 of 4 ranks wait for ever.\n"
        "  rank 1 waits at 1B0 for 2B0, at position 3 of rank 2\n"
        "  rank 2 waits at 2F1 for 1F1, at position 2 of rank 1\n"
        "  rank 0 waits at 0B0 for 1B0, at position 1 of rank 1\n"
        "  rank 3 waits at 3F1 for 2F1, at position 1 of rank 2\n"
        "2 of them wait in a circle. To open it, on rank 2 put 2B0 before 2F1, or on rank 1 put 1F1 before 1B0.\n"
        "rank 0  0F0  0F1 >0B0< 0B1\n"
        "rank 1  1F0 >1B0< 1F1  1B1\n"
        "rank 2  2F0 >2F1< 2B1  2B0\n"
        "rank 3  3F0  3B0 >3F1< 3B1"
    )


def test_a_deadlock_of_one_rank_with_itself():
    message = failure(from_csv("0F0,1F0,1B0,0B0,1F1,0F1,1B1,0B1\n", "t"))
    assert "rank 0 waits at 1F1 for 0F1, at position 5 of rank 0\n" in message
    assert "To open it, on rank 0 put 0F1 before 1F1.\n" in message


def test_a_large_grid_is_cut_around_the_culprits():
    schedule = GENERATORS["interleaved_1f1b"](pipe=32, chunks=2, num_microbatches=64)
    rows = [list(row) for row in schedule.actions]
    rows[20].insert(0, rows[20].pop(45))
    stuck = dataclasses.replace(schedule, actions=tuple(map(tuple, rows)))
    lines = failure(stuck).splitlines()
    assert lines[0] == "schedule interleaved_1f1b: " + (
        "deadlock: each rank runs its list in order, and 32 of 32 ranks wait for ever."
    )
    assert lines[1] == "  rank 21 waits at 21F0 for 20F0, at position 1 of rank 20"
    assert lines[2] == "  rank 20 waits at 52F13 for 51F13, at position 45 of rank 19"
    assert lines[13] == "  and 20 more ranks wait for these"
    assert lines[14].startswith("32 of them wait in a circle. To open it, on rank 20 put 20F0 before 52F13, or ")
    grid = lines[15:]
    assert [line.split(" [")[0] for line in grid[:-1]] == [f"rank {rank}" for rank in range(10, 22)]
    assert grid[-2].split()[2:6] == ["[0:16]", ">21F0<", "21F1", "21F2"]
    assert grid[-3].split()[2:6] == ["[0:16]", ">52F13<", "20F0", "20F1"]
    assert ">51F0<" in grid[-4]
    assert grid[-1] == "(20 more ranks not shown)"
    assert max(map(len, grid)) <= 140


def test_a_culprit_in_a_long_row_of_one_among_many_ranks():
    schedule = GENERATORS["1f1b"](pipe=40, chunks=1, num_microbatches=64)
    rows = [list(row) for row in schedule.actions]
    rows[0][100] = Action(0, Kind.F, 3)
    grid = failure(dataclasses.replace(schedule, actions=tuple(map(tuple, rows)))).splitlines()[1:]
    assert len(grid) == 13
    assert grid[0].startswith("rank 0 [92:108]")
    assert grid[0].split()[3 + 8] == ">0F3<"
    assert sum(line.count(">") for line in grid) == 1
    assert grid[-1] == "(28 more ranks not shown)"


@pytest.mark.parametrize(
    ("rows", "placement", "message"),
    [
        (("0F0,0B0",), (0, 1), "stage 1 is placed on rank 1, but there are actions for 1 rank,"),
        (("0F0,0B0", ","), (0,), "no stage is placed on rank 1"),
        ((), (), "has no actions"),
        ((",",), (0,), "has no actions"),
        (("0F0,0B0,1F0",), (0,), "1F0 at position 2 of rank 0: stages are 0 … 0 here"),
    ],
)
def test_placements_that_do_not_fit(rows, placement, message):
    actions = from_csv("\n".join(rows), "t").actions
    assert message in failure(Schedule("t", actions, placement))
