import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fiddlex.errors import ScheduleError
from fiddlex.schedules.schedule import Action, Kind, Schedule, alternate, execution_order
from tests.schedules.strategies import generated_schedules, runnable, user_schedules


def parse(*rows):
    return tuple(tuple(map(Action.parse, row.split())) for row in rows)


@pytest.mark.parametrize(
    ("token", "action"),
    [
        ("2F0", Action(2, Kind.F, 0)),
        ("0B13", Action(0, Kind.B, 13)),
        ("10I1", Action(10, Kind.I, 1)),
        ("2W0", Action(2, Kind.W, 0)),
    ],
)
def test_actions_print_and_parse_as_published_tokens(token, action):
    assert str(action) == token
    assert Action.parse(token) == action
    assert Action.parse(token).kind is action.kind


@given(st.builds(Action, st.integers(0, 10**6), st.sampled_from(Kind), st.integers(0, 10**6)))
def test_every_action_survives_print_and_parse(action):
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize("token", ["", "F0", "2F", "2f0", "2 F0", "2F0 ", "-1F0", "2X0", "2F0.5", "2SEND_F0", "٢F0"])
def test_what_is_no_action_is_refused_with_the_form_of_one(token):
    with pytest.raises(ScheduleError, match="as in 2F0") as error:
        Action.parse(token)
    assert repr(token) in str(error.value)


def test_derived_sizes():
    rows = parse("0F0 0F1 3F0 3B0 0B0 3F1 3B1 0B1", "1F0 2F0 1F1 2F1 2I0 1B0 2W0 2I1 2W1 1B1")
    schedule = Schedule("mine", rows, placement=(0, 1, 1, 0))
    assert (schedule.num_ranks, schedule.num_stages, schedule.num_chunks) == (2, 4, 2)
    assert schedule.num_microbatches == 2
    assert schedule.split_backward
    assert schedule.stages_of(1) == (1, 2)
    assert not Schedule("fused", rows[:1], placement=(0, 0)).split_backward
    uneven = Schedule("uneven", parse("0F0 0B0", "1F0 2F0 2B0 1B0"), placement=(0, 1, 1))
    assert uneven.num_chunks == 2


@given(st.one_of(user_schedules(), generated_schedules()))
def test_execution_order_keeps_each_ranks_order_and_runs_nothing_before_what_it_needs(schedule):
    rows, done = [[] for _ in schedule.actions], set()
    for rank, number in execution_order(schedule):
        action = schedule.numbered[number]
        assert runnable(action, done, schedule.num_stages)
        rows[rank].append(action)
        done.add(action)
    assert tuple(map(tuple, rows)) == schedule.actions


def test_execution_order_ends_where_all_ranks_wait():
    stalled = Schedule("stalled", parse("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"), placement=(0, 1))
    ran = [f"{rank}:{stalled.numbered[number]}" for rank, number in execution_order(stalled)]
    assert ran == ["0:0F0", "1:1F0"]


@pytest.mark.parametrize(
    ("warmup", "order"),
    [
        (0, "0F0 0B0 0F1 0B1 0F2 0B2"),
        (1, "0F0 0F1 0B0 0F2 0B1 0B2"),
        (3, "0F0 0F1 0F2 0B0 0B1 0B2"),
        (9, "0F0 0F1 0F2 0B0 0B1 0B2"),
    ],
)
def test_alternate(warmup, order):
    forwards, backwards = parse("0F0 0F1 0F2", "0B0 0B1 0B2")
    assert alternate(forwards, backwards, warmup=warmup) == list(parse(order)[0])


def test_schedules_and_clocks_load_neither_jax_nor_numpy():
    code = (
        "import sys, fiddlex.schedules.generators, fiddlex.simulate.clock; "
        "sys.exit(str({'jax', 'numpy'} & set(sys.modules)) if {'jax', 'numpy'} & set(sys.modules) else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
