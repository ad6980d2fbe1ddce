"""Why there is no plan, and what would help. Imports no jax."""

import dataclasses
from collections.abc import Iterator

from fiddlex.errors import ConfigError
from fiddlex.planner.layouts import Problem
from fiddlex.planner.report import GIB, layout_text, memory_parts
from fiddlex.planner.search import Need, search


def why_none(problem: Problem, least: Need) -> str:
    """A message for people.

    Args:
      problem: that no layout solves.
      least: the layout that needs least.
    """
    parts = ", ".join(
        f"{name} {size / GIB:.1f}" for name, size in memory_parts(least.memory).items() if size >= GIB / 20
    )
    chip = problem.topology.chip
    remedies = list(_remedies(problem, least.memory.peak))
    helps = "; ".join(remedies) if remedies else "none of what was tried (four times the devices) is enough"
    return (
        f"No layout on {problem.num_devices} {chip.name} fits {problem.limit / GIB:.1f} GiB a device. The smallest "
        f"need is {least.memory.peak / GIB:.1f} GiB, of {layout_text(least.layout)}: {parts} GiB. What would help: "
        f"{helps}."
    )


def _remedies(problem: Problem, need: int) -> Iterator[str]:
    config = problem.config
    for factor in (2, 4):
        more = dataclasses.replace(problem, num_devices=factor * problem.num_devices)
        if _fits(more):
            yield f"{more.num_devices} devices"
            break
    others = {
        "optimizer.zero1=True": dataclasses.replace(config.optimizer, zero1=True),
        "optimizer.name=adafactor": dataclasses.replace(config.optimizer, name="adafactor"),
    }
    for name, optimizer in others.items():
        if optimizer == config.optimizer:
            continue
        other = dataclasses.replace(problem, config=dataclasses.replace(config, optimizer=optimizer))
        least = search(dataclasses.replace(other, objective="memory", memory_bytes=2**62), keep=1).plans[0].memory.peak
        if least < need:
            enough = " is enough" if least <= problem.limit else ""
            yield f"{name} saves {(need - least) / GIB:.1f} GiB{f' and{enough}' if enough else ''}"


def _fits(problem: Problem) -> bool:
    try:
        return bool(search(problem, keep=1).plans)
    except ConfigError:  # the model cannot be cut for so many devices, or no link joins them
        return False
