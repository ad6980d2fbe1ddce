"""Plans with `pipeline.schedule=auto`: the best plans of a search, with a schedule that is found for each.

A schedule is found in seconds, while the times of schedules with names are known at once, so only the best plans with a
flush get one. The mesh, microbatches and recomputation of such a plan stay, and two chunks are tried beside its own
number of chunks. A run of the plan's config searches again, for the costs and the memory of the topology
(`fiddlex.planner.settle`); so does this search, whatever less memory the plans may take. Invariant: a plan with `auto`
is what a run of its config finds, fits the devices, and is better than the plan that it comes from.
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
from fiddlex.planner.auto_schedule import AUTO, Memory, Settled, find_schedule
from fiddlex.planner.cost_model import CostModel
from fiddlex.planner.layouts import Layout, Problem, layouts, schedules
from fiddlex.planner.plans import Plan, plan_of, score
from fiddlex.planner.predict import needed_memory, pipeline_of
from fiddlex.planner.report import layout_text
from fiddlex.planner.search import Found, search
from fiddlex.terminal.progress import phase
from fiddlex.terminal.readable import readable_size

logger = logging.getLogger(__name__)

CHUNKS = 2  # number of chunks that is tried besides the number of the plan


def with_auto(problem: Problem, found: Found, number: int) -> Found:
    """Adds plans with `pipeline.schedule=auto` to the result of a search, each where its score puts it.

    Schedules are searched for the `number` best plans with a flush and more than one pipe rank.
    """
    plans = list(found.plans)
    asked = _asked(problem, number) if number and plans else []
    for place, plan in enumerate(asked, start=1):
        logger.info("searching schedules for plan %d of %d: %s", place, len(asked), layout_text(plan.layout))
        if (better := _best(problem, plan)) is not None:
            bisect.insort(plans, better, key=lambda each: score(problem.objective, each))
    if number and plans and not asked:
        logger.info("no schedule is searched: no layout with a flush that fits has more than one pipe rank")
    return found._replace(plans=plans)


def _asked(problem: Problem, number: int) -> list[Plan]:
    """The best plans with a flush and more than one pipe rank, of those that differ in the schedule alone the first."""
    names = {name: traits for name, traits in schedules(problem) if "sync" in (traits.searched or ("sync",))}
    flushed = dataclasses.replace(problem, semantics=("sync",), schedules=tuple(names))
    if "sync" not in problem.semantics or not names or not any(layouts(flushed)):
        return []
    alike = sum(len(traits.chunks) for traits in names.values())  # at most so many differ in the schedule alone
    with phase("Searching the layouts with a flush"):
        plans = search(flushed, keep=number * alike).plans
    best: dict[Layout, Plan] = {}
    for plan in plans:
        if plan.layout.mesh.pipe > 1:  # one rank is a layout too where weights come chunk by chunk
            best.setdefault(plan.layout._replace(schedule=AUTO, chunks=1), plan)
    return list(best.values())[:number]


def _best(problem: Problem, plan: Plan) -> Plan | None:
    """The best plan with a schedule that is found; None if none is better than `plan`."""
    fitting = list(_searched(problem, plan))
    better = [each for each in fitting if _is_better(problem, each, plan)]
    if fitting and not better:
        logger.info("of the schedules that were found none is better than %s", plan.layout.schedule)
    return min(better, key=lambda each: score(problem.objective, each), default=None)


def _is_better(problem: Problem, one: Plan, other: Plan) -> bool:
    return score(problem.objective, one) < score(problem.objective, other)


def _searched(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """The plans with schedules that are found and fit, for each number of chunks that the layers allow."""
    of_run = dataclasses.replace(problem, memory_bytes=None)
    memory = Memory(of_run.limit, backend_of(problem.topology.compiler))
    for chunks in sorted({CHUNKS, plan.layout.chunks}):
        if plan.layout.mesh.pipe * chunks > problem.config.model.num_layers:
            continue
        fields = {"pipeline.schedule": AUTO, "pipeline.num_chunks": chunks}
        config = replaced(plan.config, fields)
        try:
            settled = find_schedule(config, plan.times, memory)
        except ConfigError as error:  # too large to be searched, or with something on the host
            logger.warning("no schedule is searched for a plan: %s", error)
            return
        planned = _planned(problem, plan.layout._replace(schedule=AUTO, chunks=chunks), config, settled)
        if planned.memory.peak <= problem.limit and planned.memory.of_host <= problem.host_limit:
            yield planned
        else:
            logger.info(
                "the schedule that is found with pipeline.num_chunks=%d is left out: it takes %s of a device and %s of "
                "its host, and plans may take %s and %s",
                chunks,
                *map(readable_size, (planned.memory.peak, planned.memory.of_host, problem.limit, problem.host_limit)),
            )


def _planned(problem: Problem, layout: Layout, config: Config, settled: Settled) -> Plan:
    """The predictions for a layout with the schedule that was found; its config keeps the word."""
    pipeline, mesh = pipeline_of(settled.config), settled.config.mesh
    model = CostModel(settled.config, problem.topology, efficiency=problem.efficiency)
    memory = needed_memory(settled.config, backend_of(problem.topology.compiler))
    times = model.microbatch(mesh, num_microbatches=layout.num_microbatches, recompute=layout.recompute)
    step = model.step(mesh, num_parameters=device_parameters(config, pipeline.placement.rows_per_rank))
    return plan_of(problem, layout, config, pipeline.placement, times, step, memory, pipeline.batch_seconds, model)
