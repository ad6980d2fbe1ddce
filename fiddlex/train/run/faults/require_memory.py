"""Warns of a program that may run out of memory, and refuses one that will, before it compiles anything."""

import functools
import logging
from collections import Counter

import jax
from jax.sharding import Mesh

from fiddlex.cluster import processes
from fiddlex.cluster.free_memory import Limit, limits, machine_id
from fiddlex.cluster.mesh import make_mesh
from fiddlex.config import Config
from fiddlex.costs.backend import GPU, TPU, Backend, backend_of
from fiddlex.costs.utilisation import topology_of
from fiddlex.errors import ConfigError
from fiddlex.planner.enough_memory import (
    MOST_ABOVE,
    Free,
    Question,
    Use,
    Verdict,
    device_needs,
    parts_text,
    process_needs,
    worst,
)
from fiddlex.planner.report import GIB
from fiddlex.train.run.checkpoints.snapshot import memory_stats

logger = logging.getLogger(__name__)


def require_memory(config: Config, mesh: Mesh, use: Use, *, force: bool) -> None:
    """Logs a warning where memory is scarce; raises ConfigError where there is too little, unless `force`.

    All processes of a run call this before anything is on `mesh`, and get the same answer. `config` is valid and
    settled.
    """
    question = worst(_questions(config, mesh, use))
    if question is None:
        return
    if question.verdict is Verdict.TOO_LITTLE and not force:
        raise ConfigError(question.text())
    if processes.is_first():
        logger.warning("%s", question.text(forced=force))


def predicted_text(config: Config, mesh: Mesh) -> str:
    """What was predicted of the memory that a run needs, for a run that had too little."""
    device = mesh.devices.flat[0]
    if device.platform == "cpu":
        needs = process_needs(config, Use.TRAINING, num_processes=processes.num_processes())
    else:
        needs = device_needs(config, _backend(config, device), Use.TRAINING)
    whose = "all fake devices of a process" if device.platform == "cpu" else "each device"
    return f"Predicted for {whose}: {sum(needs.values()) / GIB:.2f} GiB ({parts_text(needs)})."


def _questions(config: Config, mesh: Mesh, use: Use) -> list[Question]:
    """A question for each memory that processes share, or for the device of each that has the least."""
    device = mesh.devices.flat[0]
    if device.platform not in MOST_ABOVE:  # the memory model knows no such devices
        return []
    if device.platform == "cpu":
        number = processes.num_processes()
        own = [(f"{machine_id()} {where}", where, free, swap) for where, free, swap in limits()]
        told = [tuple(each) for of_process in processes.gather("free memory", own) for each in of_process]
        sharing = Counter(key for key, *_ in told)
        frees = [Free(where, free, swap, sharing[key]) for key, where, free, swap in told]
        needs_of = functools.partial(process_needs, use=use, num_processes=number)
        needs = needs_of(config)
        return [Question(config, use, "cpu", free, needs, needs_of) for free in frees]
    backend = _backend(config, device)
    least = [limit for limit in map(_free, mesh.local_devices) if limit]
    told = processes.gather("free memory", min(least, key=lambda each: each.free) if least else None)
    needs_of = functools.partial(device_needs, backend=backend, use=use)
    needs = needs_of(config)
    return [Question(config, use, device.platform, Free(*limit), needs, needs_of) for limit in told if limit]


def _free(device: jax.Device) -> Limit | None:
    """What is free of a device's memory; None where it does not tell."""
    stats = memory_stats(device)
    if not stats or "bytes_limit" not in stats:
        return None
    return Limit(f"on a {device.device_kind}", max(stats["bytes_limit"] - stats.get("bytes_in_use", 0), 0), 0)


def _backend(config: Config, device: jax.Device) -> Backend:
    topology = topology_of(config, device.device_kind)
    compiler = topology.compiler if topology else None
    if compiler and compiler.platform == device.platform:
        return backend_of(compiler)
    return TPU if device.platform == "tpu" else GPU


def require_host_memory(config: Config) -> None:
    """Raises ConfigError when CPU devices are to keep arrays in host memory: such a program runs, but saves nothing."""
    uses = {
        "pipeline.stash_memory=host": config.pipeline.spills,
        "pipeline.weights_memory=host": config.pipeline.streams,
        "optimizer.offload=true": config.optimizer.offload,
    }
    fields = [field for field, is_set in uses.items() if is_set]
    if fields and make_mesh(config.mesh).devices.flat[0].platform == "cpu":
        raise ConfigError(
            f"{' and '.join(fields)}: CPU devices have one memory, which is that of the host, so there is nothing to "
            "move. Leave it out here, or compile for a target instead, as in fiddlex compile --topology=tpu:v5e:2x4."
        )
