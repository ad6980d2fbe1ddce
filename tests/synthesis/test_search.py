"""What searches find is never worse than a named schedule and never better than the bound, and is remembered."""

import dataclasses
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fiddlex.errors import ScheduleError
from fiddlex.schedules.generators import GENERATORS
from fiddlex.schedules.lowering import lower
from fiddlex.schedules.text import to_csv
from fiddlex.simulate.clock import Costs
from fiddlex.simulate.lockstep import lockstep
from fiddlex.synthesis import cache
from fiddlex.synthesis.anywhere import find_anywhere
from fiddlex.synthesis.bounds import lower_bound
from fiddlex.synthesis.greedy import Rules, build
from fiddlex.synthesis.problem import CLOCKS, Problem
from fiddlex.synthesis.search import find
from tests.schedules.strategies import is_legal, user_schedules
from tests.synthesis.strategies import positive_costs, problems, with_weight_gradients

SHORT = 30_000  # actions


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def named(problem):
    """The judged named schedules of a problem, in both orders."""
    chunks = max(map(len, problem.stages_of))
    for generator in GENERATORS.values():
        try:
            schedule = generator(pipe=problem.num_ranks, chunks=chunks, num_microbatches=problem.num_microbatches)
        except ScheduleError:
            continue
        if schedule.placement == problem.placement:
            for strict in (False, True):
                yield problem.judge(dataclasses.replace(schedule, strict=strict))


@settings(max_examples=15, deadline=None)
@given(problems(max_pipe=3, max_microbatches=5))
def test_what_is_found_is_legal_within_the_caps_and_between_the_bound_and_every_name(problem):
    found = find(problem, effort=SHORT)
    schedule = found.schedule
    assert is_legal(schedule.actions, schedule.placement, problem.num_microbatches)
    assert problem.judge(schedule) == found.judged
    assert found.bound <= found.judged.time
    assert all(other is None or not other.better_than(found.judged) for other in named(problem))
    if problem.clock == "lockstep":
        assert lockstep(lower(schedule), problem.costs).makespan == pytest.approx(found.judged.time, rel=1e-12)


@settings(max_examples=40, deadline=None)
@given(user_schedules(), st.sampled_from(CLOCKS), st.data())
def test_no_schedule_beats_the_bound(schedule, clock, data):
    costs = data.draw(positive_costs(schedule.num_stages))
    free = Problem.in_microbatches(schedule.placement, schedule.num_microbatches, costs, clock=clock)
    free = data.draw(with_weight_gradients(free))
    judged = free.judge(schedule)
    tight = dataclasses.replace(free, caps=judged.peaks)
    for known in (2 * judged.time, math.inf):
        assert lower_bound(tight, known) <= judged.time * (1 + 1e-9)


@pytest.mark.parametrize(
    ("pipe", "chunks", "m", "cap", "clock", "bound"),
    [
        (4, 1, 8, 4, "lockstep", 27.0),  # no schedule beats the p − 1 actions of ZB-H1
        (4, 1, 8, 4, "free_running", 27.0),
        (4, 1, 8, 7, "free_running", 24.0),
        (4, 1, 8, 1, "lockstep", 72.0),  # a microbatch at a time
    ],
)
def test_bounds_that_are_reached(pipe, chunks, m, cap, clock, bound):
    problem = Problem.in_microbatches(tuple(range(pipe)) * chunks, m, Costs(), cap, clock)
    assert lower_bound(problem) == bound
    assert find(problem, effort=SHORT).judged.time == bound


@pytest.mark.parametrize(("pipe", "m"), [(4, 8), (4, 16), (8, 16)])
@pytest.mark.parametrize("clock", CLOCKS)
def test_caps_of_a_half_and_a_third_have_the_published_bubbles_or_less(pipe, m, clock):
    half = find_anywhere(pipe, 2, m, Costs(), cap=(pipe + 2) // 2, clock=clock, effort=SHORT, with_bound=False)
    third = find_anywhere(pipe, 2, m, Costs(), cap=(pipe + 4) // 3, clock=clock, effort=SHORT, with_bound=False)
    assert half.judged.time <= 6 * m + 3 * pipe - 4
    assert third.judged.time <= 6 * m + 4 * pipe - 5


def test_the_same_question_has_the_same_answer_from_the_cache_and_without_it(tmp_path, monkeypatch):
    ask = lambda: find_anywhere(3, 1, 4, Costs(1.0, 1.25, 0.75), cap=2, effort=SHORT, seed=5)  # noqa: E731
    found = ask()
    files = sorted((tmp_path / "fiddlex" / "schedules").iterdir())
    with monkeypatch.context() as no_search:
        no_search.setattr(cache, "find", None)
        assert ask() == found
    slow = Problem.in_microbatches((0, 1, 2), 4, Costs(1.0, 1.25, 0.75), 2)
    slower = to_csv(build(slow, Rules((1,) * 3)))  # within the cap, and not what was found
    (file,) = files
    right = json.loads(file.read_text())
    wrong = [{"table": slower}, {"table": 5}, {"table": ["0F0"]}, {"tried": math.inf}, {"bound": math.nan}]
    wrong += [{"bound": 2 * found.judged.time}]
    for content in ("", "{", "[" * 100_000, "[]", '{"time": 1.0}', *(json.dumps(right | change) for change in wrong)):
        file.write_text(content, encoding="utf-8")
        assert ask() == found, content[:99]
    file.unlink()
    file.mkdir()
    assert ask() == found
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")  # where nothing can be kept
    assert ask() == found
