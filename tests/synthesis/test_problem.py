"""What a problem refuses, and that a schedule is judged as the clocks of the simulator print it."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fiddlex.errors import ScheduleError
from fiddlex.schedules.lowering import lower
from fiddlex.schedules.schedule import Action, Schedule
from fiddlex.schedules.text import from_csv
from fiddlex.simulate.clock import Costs, free_running
from fiddlex.simulate.lockstep import lockstep
from fiddlex.synthesis.problem import CLOCKS, Judged, Problem
from tests.schedules.strategies import generated_schedules, user_schedules
from tests.synthesis.strategies import positive_costs


@given(st.one_of(user_schedules(), generated_schedules()), st.sampled_from(CLOCKS), st.data())
def test_a_schedule_is_judged_as_the_simulator_prints_it(schedule, clock, data):
    costs = data.draw(positive_costs(schedule.num_stages))
    problem = Problem.in_microbatches(schedule.placement, schedule.num_microbatches, costs, clock=clock)
    run = lockstep(lower(schedule), costs) if clock == "lockstep" else free_running(schedule, costs)
    judged = problem.judge(schedule)
    assert judged.time == pytest.approx(run.ideal + run.bubble, rel=1e-12)
    assert judged.makespan == pytest.approx(run.makespan, rel=1e-12)
    in_order = run.peak_inflight if clock == "lockstep" else free_running(schedule, costs).peak_inflight
    assert judged.peaks == pytest.approx(in_order)
    least = min(judged.peaks)
    if least > 1.1 * max(problem.least):
        tight = dataclasses.replace(problem, caps=(0.95 * least,) * problem.num_ranks)
        assert tight.judge(schedule) is None


def test_amounts_in_bytes_count_what_an_i_leaves():
    problem = Problem((0, 1), 2, Costs(), (100.0, 100.0), (30.0, 20.0), (5.0, 0.0))
    schedule = from_csv("0F0,0F1,0I0,0I1,0W0,0W1\n1F0,1I0,1W0,1F1,1I1,1W1\n", "t")
    assert problem.judge(schedule).peaks == (70.0, 20.0)
    assert dataclasses.replace(problem, caps=(69.0, 100.0)).judge(schedule) is None


STUCK = ("0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3", "1F0 1F1 1F2 1B0 1B1 1F3 1B2 1B3")


@pytest.mark.parametrize("strict", [True, False])
def test_an_order_in_which_ranks_wait_for_each_other_is_refused(strict):
    """Rank 0 waits at 0B0 for rank 1, which waits at 1F2 for 0F2; on ticks 0F2 could run ahead of 0B0."""
    rows = tuple(tuple(map(Action.parse, row.split())) for row in STUCK)
    stuck = Schedule("stuck", rows, (0, 1), strict)
    with pytest.raises(ScheduleError, match="wait for"):
        Problem.in_microbatches((0, 1), 4, Costs()).judge(stuck)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cap": 0.5}, r"a cap of 0.5 on rank 0 is below 1: a microbatch goes through all stages of a rank before"),
        ({"cap": math.nan}, "a cap of nan on rank 0 is below 1"),
        ({"clock": "wall"}, "clock='wall' is not one of lockstep, free_running"),
        (
            {"num_microbatches": 10**9},
            "2 stages and 1,000,000,000 microbatches make 6,000,000,000 actions",
        ),
        ({"num_microbatches": 0}, "microbatches=0 must be at least 1"),
        ({"costs": Costs(forward=0.0)}, "F of stage 0 takes 0; a search needs times above 0"),
        ({"costs": Costs(backward_weight=(1.0, 0.0))}, "W of stage 1 takes 0; a search needs times above 0"),
        ({"costs": Costs(backward_input=-1.0)}, "backward_input=-1.0 must be at least 0"),
        ({"costs": Costs(forward=math.inf)}, "forward=inf must be at least 0 and at most"),
        ({"costs": Costs(forward=(1.0, 1.0, 1.0))}, "forward has 3 times for 2 stages"),
    ],
)
def test_problems_that_cannot_be_are_refused_with_the_rule(changes, message):
    fields = {"placement": (0, 1), "num_microbatches": 4, "costs": Costs()} | changes
    with pytest.raises(ScheduleError, match=message):
        Problem.in_microbatches(**fields)


def test_better_is_a_shorter_time_and_then_a_shorter_makespan():
    assert Judged(1.0, 2.0, ()).better_than(None)
    assert Judged(1.0, 3.0, ()).better_than(Judged(2.0, 2.0, ()))
    assert Judged(1.0, 2.0, ()).better_than(Judged(1.0 + 1e-12, 3.0, ()))
    assert not Judged(1.0, 2.0, ()).better_than(Judged(1.0, 2.0, ()))
