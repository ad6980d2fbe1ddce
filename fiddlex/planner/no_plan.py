"""Explains why no layout fits, and which changes would help."""

import dataclasses
from collections.abc import Iterator

from fiddlex.errors import ConfigError
from fiddlex.planner.layouts import Problem, layouts
from fiddlex.planner.report import gib, layout_text, parts_text
from fiddlex.planner.search import Need, search

DOUBLINGS = 7  # how often to double the number of devices in search of enough memory


def why_none(problem: Problem, least: Need) -> str:
    """A message for the user: the smallest need for memory, and the changes that would help.

    Args:
      problem: a problem for which no layout fits.
      least: the layout that needs least memory, and that memory.
    """
    chip = problem.topology.chip
    devices = _enough_devices(problem)
    most = f"none of up to {2**DOUBLINGS} times the devices is enough"
    helps = "; ".join([f"{devices} devices" if devices else most, *_remedies(problem, least.memory.peak)])
    of_host = f" and {gib(problem.host_limit)} GiB of its host's memory" if least.memory.of_host else ""
    return (
        f"No layout on {problem.num_devices} {chip.name} fits {gib(problem.limit)} GiB a device{of_host}. The smallest "
        f"need is {gib(least.memory.peak)} GiB, of {layout_text(least.layout)}: {parts_text(least.memory)} GiB. What "
        f"would help: {helps}.{_host_shortage(problem, least)}"
    )


def _host_shortage(problem: Problem, least: Need) -> str:
    """What the host lacks for the layout that needs least memory; empty when it lacks nothing."""
    needed, limit, host = least.memory.of_host, problem.host_limit, problem.topology.host
    if needed <= limit:
        return ""
    pool = ""
    if host is not None and limit < host.bytes_per_device:
        pool = (
            f" of {gib(host.bytes_per_device)}, since the allocator of pinned memory gives no more by default "
            "(XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB changes that)"
        )
    return (
        f" It also needs {gib(needed)} GiB of its host's memory, where a device has {gib(limit)}{pool}: use more "
        "devices, or optimizer.offload=false."
    )


def _enough_devices(problem: Problem) -> int | None:
    """The problem's number of devices times the smallest power of two for which a layout fits; None: none does."""
    for doublings in range(1, DOUBLINGS + 1):
        more = dataclasses.replace(problem, num_devices=problem.num_devices << doublings)
        need = _smallest_need(more)
        if need is not None and need <= problem.limit:
            return more.num_devices
    return None


def _remedies(problem: Problem, need: int) -> Iterator[str]:
    """Changes of the optimizer, each with the memory that it saves by itself."""
    config = problem.config
    others = {
        "optimizer.zero1=True": dataclasses.replace(config.optimizer, zero1=True),
        "optimizer.name=adafactor": dataclasses.replace(config.optimizer, name="adafactor"),
    }
    if problem.topology.host is not None and "sync" in problem.semantics:
        others["optimizer.offload=True"] = problem.offloading.config.optimizer
    for name, optimizer in others.items():
        other = dataclasses.replace(problem, config=dataclasses.replace(config, optimizer=optimizer))
        least = _smallest_need(other) if optimizer != config.optimizer else None
        if least is not None and least < need:
            enough = "and is enough" if least <= problem.limit else "which is not enough alone"
            yield f"{name} saves {gib(need - least)} GiB, {enough}"


def _smallest_need(problem: Problem) -> int | None:
    """Bytes of the layout that needs least memory; None: there is no layout that the hosts can hold."""
    if not any(layouts(problem)):
        return None
    try:
        found = search(dataclasses.replace(problem, objective="memory", memory_bytes=2**62), keep=1)
    except ConfigError:  # no link joins that many devices
        return None
    return found.plans[0].memory.peak if found.plans else None  # no plans: the hosts have too little memory for any
