"""Schedules of hundreds of ranks: the work of all that `experiments/schedule.py` does grows as the actions do.

Calls of functions are counted, Python's and C's, which no load of the machine changes.
"""

import sys
from types import FrameType

import pytest

from fiddlex.schedules.generators import make_schedule
from fiddlex.schedules.lowering import lower
from fiddlex.schedules.text import to_text
from fiddlex.simulate.clock import Costs, free_running
from fiddlex.simulate.lockstep import lockstep

MOST_CALLS = 100  # for an action


def show(name: str, pipe: int, num_microbatches: int) -> int:
    """Makes, checks, lowers, times and draws a schedule; returns how many actions it has."""
    schedule = make_schedule(name, pipe=pipe, num_microbatches=num_microbatches)
    lowered = lower(schedule)
    for timeline in (free_running(schedule, Costs()), lockstep(lowered, Costs())):
        assert timeline.makespan >= timeline.ideal
        assert len(timeline.peak_inflight) == len(timeline.peak_weight_stash) == pipe
    assert to_text(schedule).count("\n") == to_text(schedule, lowered.ticks).count("\n") == pipe + 1
    return sum(map(len, schedule.actions))


def calls_per_action(name: str, pipe: int, num_microbatches: int) -> float:
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        actions = show(name, pipe, num_microbatches)
    finally:
        sys.setprofile(before)
    return count / actions


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "dual_pipe_v"])
def test_an_action_takes_as_much_work_in_a_long_schedule_as_in_a_short_one(name):
    show(name, 2, 4)  # what is done once for all
    few, many = (calls_per_action(name, pipe, 2 * pipe) for pipe in (8, 24))
    assert many < 1.1 * few
    assert many < MOST_CALLS
