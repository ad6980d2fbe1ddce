"""Devices and the mesh they form.

A run has one mesh, with axes `data`, `pipe` and `tensor`. Device numbers vary fastest over `tensor`, so that the ranks
that exchange most are neighbours (PTD, SC 2021, takeaway 1: tensor parallelism inside a server, pipeline across
servers, data beyond). They vary slowest over `mesh.outermost`, which therefore crosses hosts or slices first. Outside
`shard_map` the axes are automatic, and XLA partitions the optimizer; inside it all three axes are manual.
"""

import logging
import math
import os
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils, topologies
from jax.sharding import AxisType, Mesh

from fiddlex.cluster import processes
from fiddlex.cluster.platforms import leave_out_absent_tpu
from fiddlex.config import MeshConfig
from fiddlex.config.sections import AXES, SIZES
from fiddlex.errors import ConfigError, DeviceError
from fiddlex.hardware.compilers import missing_compiler
from fiddlex.hardware.topology import LIBTPU_DEVICES_PER_CHIP, catalogue, gpu_targets
from fiddlex.terminal.readable import counted

logger = logging.getLogger(__name__)

MOST_FAKE_DEVICES = 4096  # each fake device takes threads and memory

_TOPOLOGIES = (
    f"Use cpu; a topology of the catalogue, {', '.join(catalogue())}; a topology file, whose name ends in .toml; "
    "a whole slice of TPUs as tpu:NAME:SHAPE, such as tpu:v5e:2x4 or tpu:v5p:2x2x1, or several slices as "
    f"tpu:NAME:SHAPE:SLICES, such as tpu:v5e:2x4:2, of {', '.join(LIBTPU_DEVICES_PER_CHIP)}; "
    f"or GPUs as gpu:NAME:HOSTSxPER_HOST, such as gpu:h100:2x8, of {', '.join(gpu_targets())}"
)
# libtpu must not look for a TPU, and must let other processes load it at the same time.
_NO_TPU = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


def request_devices(num_devices: int) -> None:
    """Asks jax for `num_devices` fake CPU devices in this process, in case the platform is the CPU.

    Call this function before jax's first use in the process; later it has no effect. It also keeps jax from loading
    libtpu where there is no accelerator. It requests no devices where `num_devices` is above `MOST_FAKE_DEVICES`, or
    where the user has set a number of fake devices (`jax_num_cpu_devices` or XLA_FLAGS).
    """
    leave_out_absent_tpu()
    if num_devices > MOST_FAKE_DEVICES:
        return
    by_flag = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if by_flag or jax.config.jax_num_cpu_devices != -1:  # type: ignore[attr-defined]
        return
    try:
        jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError:  # jax is already running; make_mesh checks its devices
        return
    if jax.default_backend() == "cpu" and num_devices > 1:
        where = " in each process" if processes.num_processes() > 1 else ""
        logger.info("The platform is CPU: made %d fake devices%s on %d cores.", num_devices, where, num_cores())


def num_cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def make_mesh(config: MeshConfig) -> Mesh:
    """Builds the mesh, of shape [data, pipe, tensor]; on the CPU platform, first makes the fake devices that it needs.

    A run of one process leaves devices that the mesh does not need idle.

    Raises:
      ConfigError: when the mesh does not use all devices of several processes.
      DeviceError: when jax cannot start, jit is disabled, or jax has fewer devices than the mesh needs.
    """
    _require_jit()
    needed = config.num_devices
    try:
        if needed % processes.num_processes():
            raise ConfigError(
                f"mesh {config.text} has {counted(needed, 'device')}, which {processes.num_processes()} "
                "processes cannot share equally. Choose sizes whose product is a multiple of the number of processes."
            )
        request_devices(needed // processes.num_processes())
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:
        platforms = jax.config.jax_platforms or ""  # type: ignore[attr-defined]
        reason = str(error) or "no such platform here"
        raise DeviceError(
            f"jax cannot start with JAX_PLATFORMS={platforms!r}: {reason}. Unset it, or set it to a "
            "platform that is installed (cpu, cuda, tpu)."
        ) from error
    if jax.process_count() > 1 and len(devices) != needed:
        raise ConfigError(
            f"mesh {config.text} needs {counted(needed, 'device')}; the {jax.process_count()} processes have "
            f"{len(devices)}, and none may be idle. Choose {SIZES} with a product of {len(devices)}."
        )
    if len(devices) < needed:
        raise DeviceError(
            f"mesh {config.text} needs {counted(needed, 'device')}; there are {len(devices)} ({devices[0].platform}). "
            + _remedy(len(devices), devices[0].platform, needed)
        )
    if len(devices) > needed:
        logger.info("mesh %s uses %d of %d devices.", config.text, needed, len(devices))
    return _mesh(config, devices)


def make_topology_mesh(config: MeshConfig, topology: str) -> Mesh:
    """Builds the mesh on devices that this machine need not have, to compile for them; absent devices hold no arrays.

    Call this function before jax's first use in the process. From then on, the process has only the CPU platform and no
    compilation cache, since jax cannot read programs for absent devices back from that cache.

    Args:
      config: sizes of the mesh.
      topology: `cpu`, with as many devices as the mesh needs; `tpu:NAME:SHAPE`, a whole slice of TPUs (`tpu:v5e:2x4`);
        `tpu:NAME:SHAPE:SLICES`, several slices (`tpu:v5e:2x4:2`); or `gpu:NAME:HOSTSxPER_HOST`, GPUs (`gpu:h100:2x8`).

    Raises:
      ConfigError: when no such topology exists.
      DeviceError: when the mesh does not fill the topology, its compiler is not installed, or jit is disabled.
    """
    _require_jit()
    platform, _, name = topology.partition(":")
    if topology != "cpu" and not (platform in ("tpu", "gpu") and name):
        raise ConfigError(f"topology {topology!r} is not known. {_TOPOLOGIES}.")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    if topology == "cpu":
        return make_mesh(config)
    devices = _tpu_devices(name) if platform == "tpu" else _gpu_devices(name)
    if len(devices) != config.num_devices:
        raise DeviceError(
            f"mesh {config.text} needs {counted(config.num_devices, 'device')}; {topology} has {len(devices)}. Choose "
            f"{SIZES} with a product of {len(devices)}, or another topology."
        )
    return _mesh(config, devices)


def _require_jit() -> None:
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        raise DeviceError(
            "jax_disable_jit is True (JAX_DISABLE_JIT, or jax.disable_jit()): jax compiles nothing, and fiddlex runs "
            "compiled programs only. Unset JAX_DISABLE_JIT, and build the Trainer outside jax.disable_jit()."
        )


def _tpu_devices(name: str) -> Sequence[jax.Device]:
    if missing := missing_compiler(f"tpu:{name}"):
        raise DeviceError(missing)
    chip, _, shape = name.partition(":")
    shape, _, slices = shape.partition(":")
    if re.search(r"(?<!\d)0", shape):  # libtpu divides by the edges
        raise ConfigError(f"topology 'tpu:{name}' has an edge of no chips. {_TOPOLOGIES}.")
    if not re.fullmatch(r"|[1-9]\d*", slices):
        raise ConfigError(f"topology 'tpu:{name}' must end in its number of slices. {_TOPOLOGIES}.")
    for variable, value in _NO_TPU.items():
        os.environ.setdefault(variable, value)
    # The two cores of a v4 chip are one device, as they are for jax on a real v4; jax makes no mesh of single cores.
    options: dict[str, Any] = {"chip_config_name": "megacore"} if chip == "v4" else {}
    if slices:
        options["num_slices"] = int(slices)
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=f"{chip}:{shape}", **options).devices
    except jax.errors.JaxRuntimeError as error:
        raise ConfigError(f"libtpu knows no topology {name!r} ({error}). {_TOPOLOGIES}.") from error


def _gpu_devices(name: str) -> Sequence[jax.Device]:
    chip, _, shape = name.partition(":")
    targets = gpu_targets()
    if chip not in targets or not re.fullmatch(r"[1-9]\d*x[1-9]\d*", shape):
        raise ConfigError(f"topology 'gpu:{name}' is not known. {_TOPOLOGIES}.")
    if missing := missing_compiler(f"gpu:{name}"):
        raise DeviceError(missing)
    target = targets[chip].text_proto()
    return topologies.get_topology_desc(platform="cuda", topology=f"1x{shape}", target_config=target).devices


def granules(devices: Sequence[Any]) -> list[int]:
    """For each device, the number of its granule, which fast links join: a TPU's slice, or another device's host."""
    slices = [getattr(device, "slice_index", 0) for device in devices]
    if len(set(slices)) > 1 or devices[0].platform == "tpu":
        return slices
    return [device.process_index for device in devices]  # a host counts as its processes


def _mesh(config: MeshConfig, devices: Sequence[jax.Device]) -> Mesh:
    order = config.placement_order
    grid = _grid(config, devices).transpose([order.index(axis) for axis in AXES])
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _grid(config: MeshConfig, devices: Sequence[Any]) -> np.ndarray:
    """The devices by their places along the axes in `placement_order`.

    TPUs follow the torus of their slice, and each slice is a block of the grid. Other devices are in order, host after
    host, which makes each host a block too wherever the sizes divide.
    """
    sizes, needed = [getattr(config, axis) for axis in config.placement_order], config.num_devices
    numbers = granules(devices)
    if devices[0].platform != "tpu" or len(devices) > needed:
        by_granule = [devices[place] for place in np.argsort(numbers, kind="stable")]
        return np.asarray(by_granule[:needed]).reshape(sizes)
    slices = _slices_along(config, len(set(numbers)))
    if slices == [1] * len(sizes):
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    within = [size // number for size, number in zip(sizes, slices, strict=True)]
    return mesh_utils.create_hybrid_device_mesh(within, slices, devices, allow_split_physical_axes=True)


def _slices_along(config: MeshConfig, num_slices: int) -> list[int]:
    """The number of slices along each axis in `placement_order`: the first takes all that it can, the next the rest."""
    along, left = [], num_slices
    for axis in config.placement_order:
        size = getattr(config, axis)
        taken = math.gcd(size, left)
        if taken not in (size, left):
            other = "data" if config.outermost == "pipe" else "pipe"
            raise DeviceError(
                f"mesh {config.text} with mesh.outermost={config.outermost} cannot be placed on {num_slices} slices: "
                f"mesh.{axis}={size} must divide the {left} slices left for it, or be a multiple of them. Choose such "
                f"a mesh.{axis}, or mesh.outermost={other}."
            )
        along.append(taken)
        left //= taken
    return along


def _remedy(num_devices: int, platform: str, needed: int) -> str:
    fits = f"Choose {SIZES} with a product of {num_devices}"
    if platform != "cpu":
        return f"{fits} or run on more devices."
    if needed > MOST_FAKE_DEVICES:
        return f"Of a CPU at most {MOST_FAKE_DEVICES:,} fake devices are made: choose a smaller mesh."
    if (asked := os.environ.get("JAX_NUM_CPU_DEVICES")) and jax.config.jax_num_cpu_devices != -1:  # type: ignore[attr-defined]
        return f"{fits} or unset JAX_NUM_CPU_DEVICES={asked}: fiddlex makes the fake devices itself."
    flag = re.search(r"xla_force_host_platform_device_count=\d+", os.environ.get("XLA_FLAGS", ""))
    if flag:
        return f"{fits} or take {flag.group()} out of XLA_FLAGS: fiddlex makes the fake devices itself."
    return (
        f"{fits}. Fake devices can be made only before jax starts: in a notebook that has already used jax, restart it "
        "and build the Trainer first, or call fiddlex.cluster.mesh.request_devices before anything else."
    )


def describe(mesh: Mesh) -> str:
    """A one-line description of the mesh, for a log: `data=2 × pipe=1 × tensor=2 on 4 cpu devices`."""
    axes = " × ".join(f"{name}={size}" for name, size in mesh.shape.items())
    device = mesh.devices.flat[0]
    kind = "" if device.platform == "cpu" else f" ({device.device_kind})"
    count = math.prod(mesh.shape.values())
    where = f" of {processes.num_processes()} processes" if processes.num_processes() > 1 else ""
    return f"{axes} on {counted(count, f'{device.platform} device')}{kind}{where}"
