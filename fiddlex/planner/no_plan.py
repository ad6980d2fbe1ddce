"""Explains why no layout fits, and which changes would help."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from fiddlex.config.values.recompute import FULL
from fiddlex.costs.backend import backend_of
from fiddlex.costs.layer_memory import LayerMemory
from fiddlex.costs.weight_memory import weight_bytes
from fiddlex.errors import ConfigError
from fiddlex.planner.layouts import Layout, Problem, layouts, meshes, splits_sequence
from fiddlex.planner.report import layout_text, parts_text
from fiddlex.planner.search import Need, further_problems, search
from fiddlex.terminal.progress import phase
from fiddlex.terminal.readable import gib

DOUBLINGS = 7  # how often to double the number of devices in search of enough memory


def too_little(problem: Problem) -> str:
    """A message for the user where no layout can fit, even on more devices, found without a search; else empty."""
    if any(map(_may_fit, [*_problems(problem), *itertools.chain(*map(_problems, _with_more_devices(problem)))])):
        return ""
    least = min(map(least_bytes, _problems(problem)), default=0)
    return (
        f"No layout on {problem.num_devices} {problem.topology.chip.name} fits {gib(problem.limit)} GiB a device: "
        f"gradients, weights and what stages send take {gib(least)} GiB at least, and too much on up to "
        f"{2**DOUBLINGS} times the devices, too. Allow more memory (--hbm_gib), or plan for a smaller model."
    )


def least_bytes(problem: Problem) -> int:
    """Bytes that every layout of the problem takes on a device at least (`fiddlex.costs.memory.device_memory`)."""
    backend, batch = backend_of(problem.topology.compiler), problem.config.data.global_batch_size
    least = []
    for sizes in meshes(problem):
        mesh = dataclasses.replace(sizes, sequence_parallel=splits_sequence(problem, sizes))
        config = Layout(mesh, "1f1b", 1, batch // mesh.data, "sync", FULL).applied(problem.config)
        rows = -(-config.model.num_layers // mesh.pipe)
        weights, layer = weight_bytes(config, rows, backend), LayerMemory.of(config, backend)
        # of the device's layers, or of one layer where they wait on the host
        gradients = weights.outer + weights.layers // (rows if config.pipeline.by_chunk else 1)
        # three values of an example's residual stream: from the stage before, from the stage behind, and what goes out
        least.append(weights.master + weights.optimizer + gradients + 3 * layer.input)
    return min(least, default=0)


def why_none(problem: Problem, least: Need) -> str:
    """A message for the user where no layout fits: the smallest need for memory, and the changes that would help."""
    chip = problem.topology.chip
    devices = _enough_devices(problem)
    most = f"none of up to {2**DOUBLINGS} times the devices is enough"
    helps = "; ".join([f"{devices} devices" if devices else most, *_remedies(problem, least.memory.peak)])
    further = next(further_problems(problem), None)
    tried = " Layouts with more in the memory of the hosts were tried too, and do not fit." if further else ""
    of_host = f" and {gib(problem.host_limit)} GiB of its host's memory" if least.memory.of_host else ""
    return (
        f"No layout on {problem.num_devices} {chip.name} fits {gib(problem.limit)} GiB a device{of_host}. The smallest "
        f"need is {gib(least.memory.peak)} GiB, of {layout_text(least.layout)}: {parts_text(least.memory)} GiB. What "
        f"would help: {helps}.{tried}{_host_shortage(problem, least)}"
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
            "(pinned_gib of the topology's file, which XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB changes)"
        )
    pipeline = problem.config.pipeline
    uses = {
        "pipeline.stash_memory=device": pipeline.spills,
        "pipeline.weights_memory=device": pipeline.streams,
        "optimizer.offload=false": problem.config.optimizer.offload and not pipeline.streams,
    }
    fewer = " or ".join(name for name, used in uses.items() if used)
    return (
        f" It also needs {gib(needed)} GiB of its host's memory, where a device has {gib(limit)}{pool}: use more "
        f"devices, or {fewer}."
    )


def _enough_devices(problem: Problem) -> int | None:
    """The problem's number of devices times the smallest power of two for which a layout fits; None: none does."""
    return next((more.num_devices for more in _with_more_devices(problem) if _fits(more)), None)


def _with_more_devices(problem: Problem) -> Iterator[Problem]:
    for doublings in range(1, DOUBLINGS + 1):
        yield dataclasses.replace(problem, num_devices=problem.num_devices << doublings)


def _problems(problem: Problem) -> Iterator[Problem]:
    """The problem, and the problems with more on the hosts than the config says, as in `search_further`."""
    yield problem
    yield from further_problems(problem)


def _fits(problem: Problem) -> bool:
    """Whether a layout fits, with more on the hosts than the config says if need be."""
    needs = map(_smallest_need, filter(_may_fit, _problems(problem)))
    return any(need is not None and need <= problem.limit for need in needs)


def _may_fit(problem: Problem) -> bool:
    """Whether a layout may fit; where not, no search is needed, which takes far longer."""
    return least_bytes(problem) <= problem.limit


def _remedies(problem: Problem, need: int) -> Iterator[str]:
    """Changes of the config, each with the memory that it saves by itself."""

    def with_optimizer(**fields: Any) -> Problem:
        optimizer = dataclasses.replace(problem.config.optimizer, **fields)
        return dataclasses.replace(problem, config=dataclasses.replace(problem.config, optimizer=optimizer))

    others = {
        "optimizer.zero1=True": with_optimizer(zero1=True),
        "optimizer.name=adafactor": with_optimizer(name="adafactor"),
    }
    others |= problem.further
    if "sync" not in problem.semantics:
        flushed = dataclasses.replace(problem, semantics=(*problem.semantics, "sync"))
        if _fits(flushed):
            yield "sync among --semantics, which is enough"
    for name, other in others.items():
        least = _smallest_need(other) if other.config != problem.config else None
        if least is not None and least < need:
            enough = "and is enough" if least <= problem.limit else "which is not enough alone"
            yield f"{name} saves {gib(need - least)} GiB, {enough}"


def _smallest_need(problem: Problem) -> int | None:
    """Bytes of the layout that needs least memory; None: there is no layout that the hosts can hold."""
    if not any(layouts(problem)):
        return None
    try:
        with phase(f"Searching what would fit on {problem.num_devices:,} devices"):
            found = search(dataclasses.replace(problem, objective="memory", memory_bytes=2**62), keep=1)
    except ConfigError:  # no link joins that many devices
        return None
    return found.plans[0].memory.peak if found.plans else None  # no plans: the hosts have too little memory for any
