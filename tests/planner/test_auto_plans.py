"""Plans with schedules that are found: better than the plans with names, within the memory, and what a run predicts."""

import dataclasses

import pytest

from fiddlex.config import Config, ModelConfig
from fiddlex.costs.backend import backend_of
from fiddlex.hardware.topology import load_topology
from fiddlex.planner.auto_plans import with_auto
from fiddlex.planner.cost_model import CostModel
from fiddlex.planner.layouts import Problem
from fiddlex.planner.plans import score
from fiddlex.planner.predict import needed_memory, predict
from fiddlex.planner.report import as_json, as_text
from fiddlex.planner.search import search
from fiddlex.planner.settle import settle
from tests.planner.problems import a_problem


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def problem():
    """Eight wide layers on two servers, for which the best plans have pipelines."""
    model = ModelConfig("gpt", "", 8, 6144, 4, vocab_size=51200, seq_len=2048, dtype="bfloat16")
    config = Config(model=model)
    config.data.global_batch_size = 16
    return Problem(config, load_topology("a100_80"), 16, semantics=("sync",))


@pytest.mark.long
def test_plans_with_auto_are_added_where_they_are_better(problem):
    found = search(problem, keep=3)
    assert with_auto(problem, found, 0) == found
    more = with_auto(problem, found, 1)
    added = [plan for plan in more.plans if plan.layout.schedule == "auto"]
    assert added
    assert [plan for plan in more.plans if plan not in added] == found.plans
    scores = [score("time", plan) for plan in more.plans]
    assert scores == sorted(scores)
    for plan in added:
        named = a_plan_with_a_name(problem, plan)
        assert plan.step_time_s < named.step_time_s
        settled = settle(plan.config.validate(), problem.topology)
        prediction = predict(settled, CostModel(settled, problem.topology, efficiency=problem.efficiency))
        assert prediction.seconds == pytest.approx(plan.step_time_s, rel=1e-12)
        memory = needed_memory(settled, backend_of(problem.topology.compiler))
        assert memory == plan.memory
        assert memory.peak <= problem.limit


def a_plan_with_a_name(problem, plan):
    """The best plan whose layout differs in the schedule and its chunks only."""
    alike = plan.layout._replace(schedule="", chunks=0)
    every = search(problem, keep=10_000).plans
    return next(other for other in every if other.layout._replace(schedule="", chunks=0) == alike)


def test_where_plans_may_take_less_than_the_chip_has_a_plan_has_still_what_a_run_finds(problem, caplog):
    """A run knows the memory of the chip alone, so a smaller limit only rules plans out."""
    (plan,) = (plan for plan in with_auto(problem, search(problem, keep=1), 1).plans if plan.layout.schedule == "auto")
    for limit, added in ((plan.memory.peak, [plan]), (plan.memory.peak - 1, [])):
        less = dataclasses.replace(problem, memory_bytes=limit)
        with caplog.at_level("INFO", "fiddlex"):
            plans = with_auto(less, search(less, keep=1), 1).plans
        assert [other for other in plans if other.layout == plan.layout] == added
    assert "pipeline.num_chunks=2 is left out: it takes 11.40 GiB of a device and 0 bytes of its host" in caplog.text


def test_the_report_has_them(problem):
    found = with_auto(problem, search(problem, keep=2), 1)
    (number,) = [n for n, plan in enumerate(found.plans) if plan.layout.schedule == "auto"]
    assert as_json(problem, found)["plans"][number]["pipeline"]["schedule"] == "auto"
    assert " auto" in as_text(problem, found)


def test_where_delayed_weights_are_best_the_best_with_a_flush_is_searched(problem):
    both = dataclasses.replace(problem, semantics=("2bw", "sync"))
    found = with_auto(both, search(both, keep=1), 1)
    assert found.plans[0].layout.semantics == "2bw"
    assert [plan.layout.schedule for plan in found.plans[1:]] == ["auto"]


def test_layouts_of_one_rank_take_no_place_of_those_whose_schedule_is_searched(caplog):
    """The five best have one pipe rank."""
    problem = a_problem(num_devices=4, semantics=("sync",))
    found = search(problem, keep=5)
    assert {plan.layout.mesh.pipe for plan in found.plans} == {1}
    with caplog.at_level("INFO", "fiddlex"):
        plans = with_auto(problem, found, 1).plans
    (line,) = (line for line in caplog.messages if line.startswith("searching schedules for plan 1 of 1: "))
    assert "pipe=2" in line
    assert {plan.layout.mesh.pipe for plan in plans if plan not in found.plans} <= {2}


@pytest.mark.parametrize("changes", [{"num_devices": 1}, {"semantics": ("2bw",), "schedules": ("1f1b",)}])
def test_without_a_flush_and_several_ranks_no_schedule_is_searched(changes, caplog):
    problem = a_problem(**{"num_devices": 4, "semantics": ("sync",), **changes})
    found = search(problem, keep=2)
    with caplog.at_level("INFO", "fiddlex"):
        assert with_auto(problem, found, 2) == found
    assert caplog.messages == ["no schedule is searched: no layout with a flush that fits has more than one pipe rank"]
