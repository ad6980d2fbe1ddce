"""Plans with `pipeline.schedule=auto`: the best plans of a search, with a schedule that is found for each.

The space of the planner has the schedules with names, whose times it knows at once. A schedule is found in seconds, so
only a few plans can have one: those that the names put first. Each is a plan with a flush; its mesh, microbatches and
recomputation stay, and two chunks are tried beside its own number of chunks. Invariant: a plan with
`auto` fits the devices, and is better than the plan that it comes from.
"""

import bisect
import dataclasses
import logging
from collections.abc import Iterator

from fiddlex.config import Config
from fiddlex.config.overrides import replaced
from fiddlex.costs.backend import backend_of
from fiddlex.costs.weight_memory import device_parameters
from fiddlex.errors import ConfigError
from fiddlex.planner.cost_model import CostModel
from fiddlex.planner.found import AUTO, Memory, Settled, find_schedule
from fiddlex.planner.layouts import Layout, Problem
from fiddlex.planner.predict import needed_memory, pipeline_of
from fiddlex.planner.search import Found, Plan, plan_of, score, search
from fiddlex.schedules.generators import GENERATORS

logger = logging.getLogger(__name__)

CHUNKS = 2  # number of chunks that is tried besides the number of the plan


def with_auto(problem: Problem, found: Found, number: int) -> Found:
    """Adds plans with `pipeline.schedule=auto` to the result of a search, each where its score puts it.

    Args:
      problem: the problem that the search solved.
      found: the result of the search.
      number: for how many of the best plans with a flush and more than one pipe rank schedules are searched.

    Returns:
      The result with the plans that were added, sorted.
    """
    plans, asked = list(found.plans), list[Layout]()
    for plan in _flushed(problem, found, number) if number else ():
        question = plan.layout._replace(schedule=AUTO, chunks=1)
        if plan.layout.pipe > 1 and question not in asked and len(asked) < number:
            asked.append(question)
            if (better := _best(problem, plan)) is not None:
                bisect.insort(plans, better, key=lambda each: score(problem.objective, each))
    return found._replace(plans=plans)


def _flushed(problem: Problem, found: Found, number: int) -> list[Plan]:
    """The best plans with a flush, several for each layout that differs in the schedule alone."""
    if "sync" not in problem.semantics or not found.plans:
        return []
    several = number * len(GENERATORS)
    return search(dataclasses.replace(problem, semantics=("sync",)), keep=several).plans


def _best(problem: Problem, plan: Plan) -> Plan | None:
    """The best plan with a schedule that is found; None if none is better than `plan`."""
    better = [each for each in _searched(problem, plan) if _is_better(problem, each, plan)]
    return min(better, key=lambda each: score(problem.objective, each), default=None)


def _is_better(problem: Problem, one: Plan, other: Plan) -> bool:
    return score(problem.objective, one) < score(problem.objective, other)


def _searched(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """The plans with schedules that are found and fit, for each number of chunks that the layers allow."""
    memory = Memory(problem.limit, backend_of(problem.topology.compiler))
    for chunks in sorted({CHUNKS, plan.layout.chunks}):
        if plan.layout.pipe * chunks > problem.config.model.num_layers:
            continue
        fields = {"pipeline.schedule": AUTO, "pipeline.num_chunks": chunks}
        config = replaced(plan.config, fields)
        try:
            settled = find_schedule(config, plan.times, memory)
        except ConfigError as error:  # too large to be searched, or with something on the host
            logger.warning("no schedule is searched for a plan: %s", error)
            return
        if settled.fits:
            yield _planned(problem, plan.layout._replace(schedule=AUTO, chunks=chunks), config, settled)


def _planned(problem: Problem, layout: Layout, config: Config, settled: Settled) -> Plan:
    """The predictions for a layout with the schedule that was found; its config keeps the word."""
    pipeline, mesh = pipeline_of(settled.config), settled.config.mesh
    model = CostModel(settled.config, problem.topology, efficiency=problem.efficiency)
    memory = needed_memory(settled.config, backend_of(problem.topology.compiler))
    times = model.microbatch(mesh, num_microbatches=layout.num_microbatches, recompute=layout.recompute)
    step = model.step(mesh, num_parameters=device_parameters(config, pipeline.placement.rows_per_rank))
    return plan_of(problem, layout, config, pipeline.placement, times, step, memory, pipeline.batch_seconds, model)
