import pytest

from fiddlex.errors import ScheduleError
from fiddlex.schedules.generators import GENERATORS, make_schedule
from fiddlex.simulate.clock import Costs
from fiddlex.simulate.comparison import Missing, compare, costs_of_stages, to_text

CLOCKS = {"free_running": "free-running", "lockstep": "lockstep"}


def make(name):
    name, _, chunks = name.partition("@")
    return make_schedule(name, pipe=4, chunks=int(chunks) if chunks else None, num_microbatches=8)


def test_all_schedules_do_the_same_work():
    names = [*GENERATORS, "interleaved_1f1b@3", "breadth_first@2"]
    rows = compare(names, make, Costs(forward=3.0, backward_input=4.0, backward_weight=5.0, hop=0.25))
    assert [row.name for row in rows] == names
    for row in rows:
        assert row.costs.hop == 0.25  # as much crosses a hop, however short a stage is
        for timeline in row.timelines.values():
            assert timeline.work == pytest.approx((8 * 12,) * 4)


def test_times_of_each_stage_stay_as_given():
    costs = Costs(forward=(1.0, 2.0, 3.0, 4.0), backward_input=2.0)
    own = costs_of_stages(costs, 1 / 2)
    assert (own.forward, own.backward_input, own.backward_weight) == ((1.0, 2.0, 3.0, 4.0), 1.0, 0.5)


def test_a_schedule_that_does_not_exist_hides_no_other():
    rows = compare(["interleaved_1f1b", "1f1c", "1f1b", "zb_v"], make, Costs(forward=(1.0, 1.0, 1.0, 2.0)))
    assert [isinstance(row, Missing) for row in rows] == [False, True, False, True]
    lines = to_text(rows, Costs(), {"lockstep": "lockstep"}).splitlines()
    assert lines[3] == "1f1c             there is no schedule '1f1c'. Did you mean '1f1b'?"
    assert lines[5].startswith("zb_v             costs: forward has 4 times for 8 stages")
    assert "free-running" not in lines[0]


def test_a_schedule_that_breaks_a_rule_is_told_whole():
    def broken(name):
        raise ScheduleError("it stalls:\n  rank 0\n")

    (row,) = compare(["mine"], broken, Costs())
    assert "\nmine     it stalls:\n           rank 0\n\n" in to_text([row], Costs(), CLOCKS)
