"""What searches find is never worse than a named schedule and never better than the bound, and is remembered."""

import dataclasses
import itertools
import json
import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fiddlex.errors import ScheduleError
from fiddlex.schedules.generators import GENERATORS
from fiddlex.schedules.lowering import lower
from fiddlex.schedules.schedule import Action, Kind, Schedule
from fiddlex.schedules.text import to_csv
from fiddlex.simulate.clock import Costs
from fiddlex.simulate.lockstep import lockstep
from fiddlex.synthesis import bounds, cache
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


IN_A_V = Costs(0.25, 0.25, 0.25, tick=0.25)  # in which dual_pipe_v is fastest in the order `ahead`


@settings(max_examples=15, deadline=None)
@example(Problem.in_microbatches((0, 1, 1, 0), 4, IN_A_V, math.inf, "lockstep"))
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


def test_the_schedules_that_were_judged_are_counted_and_no_others(monkeypatch):
    judge, judged = Problem.judge, []

    def counted(problem, schedule):
        judged.append(schedule)
        return judge(problem, schedule)

    monkeypatch.setattr(Problem, "judge", counted)
    found = find(Problem.in_microbatches((0, 1), 4, Costs(1.0, 1.25, 0.75)), effort=SHORT, with_bound=False)
    assert found.tried == len(judged)


@given(user_schedules(), st.sampled_from(CLOCKS), st.data())
def test_no_schedule_beats_the_bound(schedule, clock, data):
    costs = data.draw(positive_costs(schedule.num_stages))
    free = Problem.in_microbatches(schedule.placement, schedule.num_microbatches, costs, clock=clock)
    free = data.draw(with_weight_gradients(free))
    judged = free.judge(schedule)
    tight = dataclasses.replace(free, caps=judged.peaks)
    for known in (2 * judged.time, math.inf):
        assert lower_bound(tight, known) <= judged.time * (1 + 1e-9)


@st.composite
def tiny_problems(draw):
    """Two microbatches on two or three ranks, with one stage that takes long and W that take little."""
    pipe = draw(st.integers(2, 3))
    heavy = draw(st.integers(0, pipe - 1))
    above, any_time = (st.integers(least, 4).map(lambda quarters: quarters / 4) for least in (1, 0))
    rows = [[draw(above) + 2.0 * (stage == heavy) for stage in range(pipe)] for _ in range(2)]
    weights = [draw(st.sampled_from([0.25, 1.0])) for _ in range(pipe)]
    hops = [draw(any_time) for _ in range(pipe)]
    edges = [draw(any_time) for _ in range(3)]
    costs = Costs(*map(tuple, (*rows, weights, hops)), *edges)
    cap, clock = draw(st.sampled_from([1, 2])), draw(st.sampled_from(CLOCKS))
    return Problem.in_microbatches(tuple(range(pipe)), 2, costs, cap, clock)


def all_times(problem):
    """The times of all orders of a problem with one stage on each rank."""
    for kinds in ((Kind.F, Kind.B), (Kind.F, Kind.I, Kind.W)):
        orders = [
            order
            for order in set(itertools.permutations(kinds * problem.num_microbatches))
            if all(
                order[:end].count(one) >= order[:end].count(other)
                for end in range(1, len(order))
                for one, other in itertools.pairwise(kinds)
            )
        ]
        for chosen in itertools.product(orders, repeat=problem.num_ranks):
            rows = (
                tuple(Action(rank, kind, order[:at].count(kind)) for at, kind in enumerate(order))
                for rank, order in enumerate(chosen)
            )
            schedule = Schedule("any", tuple(rows), problem.placement)
            if not is_legal(schedule.actions, schedule.placement, problem.num_microbatches):
                continue
            for strict in (False, True):
                if judged := problem.judge(dataclasses.replace(schedule, strict=strict)):
                    yield judged.time


@settings(max_examples=25, deadline=None)
@given(tiny_problems())
def test_no_order_at_all_beats_the_bound(problem):
    assert lower_bound(problem) <= min(all_times(problem)) * (1 + 1e-9)


def test_a_fine_grid_gives_a_larger_bound_than_a_coarse_one(monkeypatch):
    """A V of two ranks that hold one microbatch at a time, with times that are no multiples of a common one."""
    problem = Problem.in_microbatches((0, 1, 1, 0), 12, Costs(1.0, 1.37, 0.37, 0.11), 1, "free_running")
    assert lower_bound(problem) > 83.0
    monkeypatch.setattr(bounds, "CELLS", bounds.CELLS[:1])
    assert lower_bound(problem) < 81.0


HEAVY_HEAD = Costs(1.0, 1.0, 0.25, head=5.0)
HEAVY_MIDDLE = Costs((1.0, 4.0, 1.0), (1.0, 4.0, 1.0), (2.0, 0.25, 2.0), hop=0.5)


@pytest.mark.parametrize(
    ("placement", "m", "cap", "clock", "costs", "bound"),
    [
        ((0, 1, 2, 3), 8, 4, "lockstep", Costs(), 27.0),  # no schedule beats the p − 1 actions of ZB-H1
        ((0, 1, 2, 3), 8, 4, "free_running", Costs(), 27.0),
        ((0, 1, 2, 3), 8, 7, "free_running", Costs(), 24.0),
        ((0, 1, 2, 3), 8, 1, "lockstep", Costs(), 72.0),  # a microbatch at a time
        ((0, 1), 4, math.inf, "free_running", HEAVY_HEAD, 30.25),  # rank 0 waits for all F and I of rank 1
        ((0, 1, 2), 4, math.inf, "free_running", dataclasses.replace(HEAVY_HEAD, hop=0.5), 34.25),
        ((0, 1, 2), 4, math.inf, "free_running", HEAVY_MIDDLE, 37.0),
        ((1, 0, 2), 4, math.inf, "free_running", HEAVY_MIDDLE, 37.0),
        ((0, 1, 1, 0), 3, math.inf, "free_running", Costs((1, 2, 2, 1), (1, 2, 2, 1), 0.25), 26.25),
    ],
)
def test_bounds_that_are_reached(placement, m, cap, clock, costs, bound):
    problem = Problem.in_microbatches(placement, m, costs, cap, clock)
    assert lower_bound(problem) == bound
    assert find(problem, effort=SHORT).judged.time == bound


@pytest.mark.parametrize(
    ("pipe", "m"), [(4, 8), *(pytest.param(*sizes, marks=pytest.mark.long) for sizes in [(4, 16), (8, 16)])]
)
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
    for name in ("XDG_CACHE_HOME", "HOME"):  # a user without a home and an entry, as in a container
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    assert ask() == found
