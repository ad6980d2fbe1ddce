"""Devices and the mesh they form.

There is one mesh, with axes `data`, `pipe` and `tensor`. `tensor` varies fastest, so that the ranks that exchange most
are neighbours (PTD, SC 2021, takeaway 1: tensor parallelism inside a server, pipeline across servers, data beyond).
Axes are automatic outside `shard_map`, where XLA places the optimizer, and manual over all three inside it.
"""

import logging
import math
import os
import re

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from fiddlex.config import MeshConfig
from fiddlex.errors import DeviceError

logger = logging.getLogger(__name__)

AXES = ("data", "pipe", "tensor")


def request_devices(num_devices: int) -> None:
    """Asks jax for `num_devices` fake CPU devices, for the case that the platform turns out to be the CPU.

    Has an effect only before jax's first use in the process; on accelerators it changes nothing that a run sees.
    Leaves the number alone where the user has set it (`jax_num_cpu_devices` or XLA_FLAGS) or runs several processes.
    """
    by_flag = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if by_flag or jax.config.jax_num_cpu_devices != -1 or jax.distributed.is_initialized():  # type: ignore[attr-defined]
        return
    try:
        jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError:  # jax is already running; make_mesh checks what it has
        return
    if jax.default_backend() == "cpu" and num_devices > 1:
        logger.info("The platform is CPU: made %d fake devices on %d cores.", num_devices, num_cores())


def num_cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def make_mesh(config: MeshConfig) -> Mesh:
    """Builds the mesh, on CPU after making the fake devices it needs.

    Returns:
      A mesh of shape [data, pipe, tensor]; when the process has more devices than that, on the first of them.

    Raises:
      DeviceError: when jax cannot start, there are fewer devices than the mesh needs, or several processes.
    """
    needed = config.num_devices
    try:
        request_devices(needed)
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:
        platforms = os.environ.get("JAX_PLATFORMS", "")
        raise DeviceError(
            f"jax cannot start with JAX_PLATFORMS={platforms!r}: {error or 'no such platform here'}. Unset it, or set "
            "it to a platform that is installed (cpu, cuda, tpu)."
        ) from error
    shape = f"mesh data={config.data} × pipe={config.pipe} × tensor={config.tensor}"
    if jax.process_count() > 1:
        raise DeviceError(
            f"{jax.process_count()} processes: this release trains in one process, on one host's devices."
        )
    if len(devices) < needed:
        raise DeviceError(
            f"{shape} needs {needed} devices; there are {len(devices)} ({devices[0].platform}). "
            + _remedy(len(devices), devices[0].platform)
        )
    if len(devices) > needed:
        logger.info("%s uses %d of %d devices.", shape, needed, len(devices))
    sizes = (config.data, config.pipe, config.tensor)
    if len(devices) == needed and devices[0].platform != "cpu":
        grid = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    else:
        grid = np.asarray(devices[:needed]).reshape(sizes)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _remedy(num_devices: int, platform: str) -> str:
    fits = f"Choose mesh.data, mesh.pipe and mesh.tensor with a product of {num_devices}"
    if platform != "cpu":
        return f"{fits} or run on more devices."
    flag = re.search(r"xla_force_host_platform_device_count=\d+", os.environ.get("XLA_FLAGS", ""))
    if flag:
        return f"{fits} or take {flag.group()} out of XLA_FLAGS: fiddlex makes the fake devices itself."
    return (
        f"{fits}. Fake devices can be made only before jax starts: in a notebook that has already used jax, restart it "
        "and build the Trainer first, or call fiddlex.mesh.request_devices before anything else; unset "
        "JAX_NUM_CPU_DEVICES if it is set."
    )


def describe(mesh: Mesh) -> str:
    """One line for a log: `data=2 × pipe=1 × tensor=2 on 4 cpu devices`."""
    axes = " × ".join(f"{name}={size}" for name, size in mesh.shape.items())
    device = mesh.devices.flat[0]
    kind = "" if device.platform == "cpu" else f" ({device.device_kind})"
    count = math.prod(mesh.shape.values())
    return f"{axes} on {count} {device.platform} device{'s' * (count > 1)}{kind}"
