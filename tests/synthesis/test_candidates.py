"""Schedules of rules and of blocks, and moves: each is legal and within the caps, whatever the problem."""

import dataclasses
import operator
import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fiddlex.schedules.generators import make_schedule
from fiddlex.schedules.schedule import Kind
from fiddlex.schedules.text import from_csv
from fiddlex.simulate.clock import Costs
from fiddlex.synthesis import beam, blocks
from fiddlex.synthesis.greedy import Rules, build, round_trips
from fiddlex.synthesis.local_search import improve
from fiddlex.synthesis.problem import Problem
from tests.schedules.strategies import is_legal
from tests.synthesis.strategies import problems, with_weight_gradients


@st.composite
def rules(draw, num_stages):
    ahead = tuple(draw(st.lists(st.integers(1, 9), min_size=num_stages, max_size=num_stages)))
    patience = draw(st.sampled_from([0.0, 0.5, 1.0]))
    return Rules(ahead, *(draw(st.booleans()) for _ in range(4)), patience, draw(st.booleans()))


def assert_fits(problem, schedule):
    assert is_legal(schedule.actions, schedule.placement, problem.num_microbatches)
    in_order = dataclasses.replace(problem, clock="free_running")  # its peaks are those of the order
    assert in_order.judge(schedule) is not None


def assert_fits_if_it_must(problem, schedule, splits):
    """The caps are sure to be kept if a microbatch and what an I leaves fit together, or backwards are whole."""
    largest = (max(problem.weight_gradient[stage] for stage in stages) for stages in problem.stages_of)
    if splits and any(map(operator.lt, problem.caps, map(operator.add, problem.least, largest))):
        assert is_legal(schedule.actions, schedule.placement, problem.num_microbatches)
    else:
        assert_fits(problem, schedule)


@settings(max_examples=200)
@given(problems(), st.data())
def test_what_ranks_with_rules_run_is_legal_and_within_the_caps(problem, data):
    drawn = data.draw(rules(problem.num_stages))
    problem = data.draw(with_weight_gradients(problem))
    schedule = build(problem, drawn)
    assert_fits_if_it_must(problem, schedule, drawn.splits)
    assert schedule.split_backward == drawn.splits
    most = [0] * problem.num_stages
    for row in schedule.actions:
        for stage, kind, _ in row:
            most[stage] += {Kind.F: 1, Kind.W: 0}.get(kind, -1)
            assert most[stage] <= drawn.ahead[stage]


@settings(max_examples=60, deadline=None)
@given(problems(), st.integers(1, 20), st.booleans(), st.data())
def test_what_a_beam_search_finds_is_legal_and_within_the_caps(problem, width, splits, data):
    problem = data.draw(with_weight_gradients(problem))
    schedule = beam.search(problem, width=width, splits=splits)
    if schedule is not None:
        assert schedule.split_backward == splits
        assert_fits_if_it_must(problem, schedule, splits)


@pytest.mark.parametrize(
    ("placement", "m", "cap", "costs", "width", "time"),
    [
        ((0, 1, 2, 3), 8, 4, Costs(), 64, 27.0),  # 3m + p − 1, which is least
        ((0, 1, 2, 3, 3, 2, 1, 0), 8, 2, Costs(), 64, 59.0),  # V-Min's
        ((0, 1, 2, 3) * 2, 8, 2, Costs(), 64, 68.0),
        ((0, 1) * 2, 6, 1, Costs(), 8, 49.0),
        ((0, 1) * 2, 6, 2, Costs(2.0, 1.0, 2.0), 16, 67.0),
        ((0, 1), 8, 8, Costs(2.0, 3.0, 1.0), 64, 52.0),  # least with one action of a rank in a tick
    ],
)
def test_times_of_beam_searches(placement, m, cap, costs, width, time):
    problem = Problem.in_microbatches(placement, m, costs, cap)
    assert problem.judge(beam.search(problem, width=width)).time == time


def test_round_trips_of_1f1b():
    problem = Problem.in_microbatches((0, 1, 2, 3), 8, Costs(forward=1, backward_input=2, backward_weight=0.5, hop=0.5))
    assert round_trips(problem) == pytest.approx([(3 * n + n - 1) / 3.5 for n in (4, 3, 2, 1)])


@settings(max_examples=60)
@given(problems())
def test_blocks_give_legal_schedules(problem):
    for block in [*blocks.regular(problem)][:12]:
        schedule = blocks.repeated(problem, block)
        assert is_legal(schedule.actions, schedule.placement, problem.num_microbatches)


@pytest.mark.long
@settings(max_examples=settings.default.max_examples // 2)
@given(problems(max_pipe=3))
def test_a_solved_block_keeps_the_caps_when_it_is_repeated(problem):
    block, proven = blocks.solved(problem)
    assert proven >= 3 * max(map(len, problem.stages_of))
    if block is not None:
        assert block.period >= proven
        assert_fits(problem, blocks.repeated(problem, block))


@pytest.mark.parametrize(
    ("pipe", "chunks", "cap", "period"),
    [
        (4, 1, 4, 3),  # 1F1B's cap
        (4, 1, 2, 5),
        (4, 1, 1, 9),  # a microbatch at a time: there, back and a W
        (2, 1, 1, 5),
        (4, 2, 2, 6),  # V-Min's cap
        (3, 2, 1, 10),  # of which a period of 9 is not ruled out by what a microbatch holds for how long
    ],
)
def test_shortest_periods(pipe, chunks, cap, period):
    placement = (*range(pipe), *reversed(range(pipe)))[: pipe * chunks]
    block, proven = blocks.solved(Problem.in_microbatches(placement, 8, Costs(), cap))
    assert block.period == period >= proven >= period - 1


@settings(max_examples=30, deadline=None)
@given(problems(max_microbatches=4), st.integers(0, 99), st.booleans())
def test_moves_never_make_a_schedule_worse_and_keep_it_legal(problem, seed, strict):
    start = build(problem, Rules((9,) * problem.num_stages, splits=random.Random(seed).random() < 0.5))
    start = dataclasses.replace(start, strict=strict)
    judged = problem.judge(start)
    assume(judged is not None)  # where forwards run ahead, ranks may hold more
    moved, better, _ = improve(problem, start, judged, tries=60, seed=seed)
    assert_fits(problem, moved)
    assert problem.judge(moved) == better
    assert not judged.better_than(better)


def test_moves_find_the_best_order_from_a_bad_one():
    """GPipe's order with split backwards, which waits a whole pass more than ZB-H1."""
    worse = from_csv("0F0,0F1,0F2,0I0,0W0,0I1,0W1,0I2,0W2\n1F0,1F1,1F2,1I0,1W0,1I1,1W1,1I2,1W2\n", "worse")
    problem = Problem.in_microbatches((0, 1), 3, Costs())
    judged = problem.judge(worse)
    best = problem.judge(make_schedule("zb_h1", pipe=2, num_microbatches=3)).time
    assert judged.time > best
    _, found, _ = improve(problem, worse, judged, tries=400, seed=0)
    assert found.time == best
