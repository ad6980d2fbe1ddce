"""Plans for people, for programs, and as config files. Imports no jax."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from fiddlex.config import Config
from fiddlex.planner.layouts import Layout, Problem
from fiddlex.planner.search import Found, Plan
from fiddlex.simulate.memory import Memory
from fiddlex.sizes import num_parameters

GIB = 2**30
_COLUMNS = (
    ("data", lambda plan: f"{plan.layout.data}"),
    ("pipe", lambda plan: f"{plan.layout.pipe}"),
    ("tensor", lambda plan: f"{plan.layout.tensor}{'+sp' * plan.layout.sequence_parallel}"),
    ("schedule", lambda plan: f"{plan.layout.schedule}{f' v={plan.layout.chunks}' * (plan.layout.chunks > 1)}"),
    ("microbatches", lambda plan: f"{plan.layout.num_microbatches} of {plan.config.microbatch_size}"),
    ("semantics", lambda plan: plan.layout.semantics),
    ("recompute", lambda plan: plan.layout.recompute),
    ("step, s", lambda plan: f"{plan.step_time_s:.4g}"),
    ("TFLOP/s", lambda plan: f"{plan.tflops_per_device:.1f}"),
    ("of peak", lambda plan: f"{plan.utilisation:.1%}"),
    ("GiB", lambda plan: f"{plan.memory.peak / GIB:.1f}"),
    ("bubble", lambda plan: f"{plan.bubble:.1%}"),
    ("exposed", lambda plan: f"{sum(plan.exposed_s.values()) / plan.step_time_s:.1%}"),
    ("USD/step", lambda plan: "" if plan.usd_per_step is None else f"{plan.usd_per_step:.4g}"),
)


def as_text(problem: Problem, found: Found) -> str:
    """The plans as a table, and what the first one is made of."""
    best = found.plans[0]
    rows = [[name for name, _ in _COLUMNS], *([cell(plan) for _, cell in _COLUMNS] for plan in found.plans)]
    parts = ", ".join(
        f"{name} {size / GIB:.1f}" for name, size in memory_parts(best.memory).items() if size >= GIB / 20
    )
    exposed = ", ".join(f"{name} {time / best.step_time_s:.1%}" for name, time in best.exposed_s.items())
    return (
        f"{describe(problem)}\n{found.space:,} layouts, {found.simulated} of them simulated\n\n{_table(rows)}\n\n"
        f"memory of the first, GiB on each device: {parts}\n"
        f"communication of the first that nothing hides, of the step: {exposed}; its bubble is {best.bubble:.1%}"
    )


def describe(problem: Problem) -> str:
    """What was asked, in a line."""
    config, chip = problem.config, problem.topology.chip
    return (
        f"{num_parameters(config.model, len(config.data.classes)):,} parameters in {config.model.dtype}, batches of "
        f"{config.data.global_batch_size:,} examples, {problem.num_devices:,} {chip.name}, {problem.limit / GIB:.4g} "
        "GiB of each to use"
    )


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def as_json(problem: Problem, found: Found) -> dict[str, Any]:
    """The plans as one JSON object."""
    return {
        "topology": problem.topology.name,
        "num_devices": problem.num_devices,
        "objective": problem.objective,
        "memory_limit_bytes": problem.limit,
        "layouts": found.space,
        "simulated": found.simulated,
        "plans": [plan_facts(plan) for plan in found.plans],
    }


def plan_facts(plan: Plan) -> dict[str, Any]:
    """One plan: `mesh` and `pipeline` are fields of a config."""
    return {
        "mesh": dataclasses.asdict(plan.config.mesh),
        "pipeline": dataclasses.asdict(plan.config.pipeline),
        "microbatch_size": plan.config.microbatch_size,
        "step_time_s": plan.step_time_s,
        "tflops_per_device": plan.tflops_per_device,
        "utilisation": plan.utilisation,
        "bubble_fraction": plan.bubble,
        "exposed_s": plan.exposed_s,
        "usd_per_step": plan.usd_per_step,
        "peak_bytes": plan.memory.peak,
        "memory_bytes": memory_parts(plan.memory),
    }


def memory_parts(memory: Memory) -> dict[str, int]:
    """Bytes on each device by what they are for, the most first."""
    return dict(sorted(memory._asdict().items(), key=lambda part: -part[1]))


def layout_text(layout: Layout) -> str:
    """A layout in a line."""
    return (
        f"data={layout.data}, pipe={layout.pipe}, tensor={layout.tensor}, sequence_parallel="
        f"{layout.sequence_parallel}, {layout.schedule} with {layout.chunks} chunk{'s' * (layout.chunks > 1)} and "
        f"{layout.num_microbatches} microbatches, {layout.semantics}, recompute={layout.recompute}"
    )


def as_python(config: Config, title: str) -> str:
    """A config file that gives `config`.

    Args:
      config: to write; what it has by default is left out.
      title: first line of the file's docstring.
    """
    title = title.replace("\\", "\\\\").replace('"', '\\"')  # a topology's path or chip may have them
    names = [type(getattr(config, section.name)).__name__ for section in dataclasses.fields(config)]
    sections = []
    for section in dataclasses.fields(config):
        values = getattr(config, section.name)
        fields = [
            f"            {field.name}={getattr(values, field.name)!r},\n"
            for field in dataclasses.fields(values)
            if getattr(values, field.name) != field.default
        ]
        body = f"\n{''.join(fields)}        " if fields else ""
        sections.append(f"        {section.name}={type(values).__name__}({body}),\n")
    imported = ", ".join(sorted(["Config", *names]))
    return (
        f'"""{title}"""\n\nfrom fiddlex.config import {imported}\n\n\n'
        f"def get_config() -> Config:\n    return Config(\n{''.join(sections)}    )\n"
    )
