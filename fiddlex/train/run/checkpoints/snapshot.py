"""A copy of the state on its devices, from which a checkpoint is written while the training goes on.

The train step takes over the memory of its state (donation). So a run must copy its state before it goes on: to the
host, for which it waits, or on the devices, for which it does not. From a copy on the devices a thread then reads while
the next steps run (the snapshot of CheckFreq, Mohan et al., FAST 2021). That copy needs as much memory as the state,
beside the state and the temporaries of a step. Devices of the CPU have no memory of their own, so they copy to the
host.
"""

import logging
import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp

from fiddlex.cluster import processes
from fiddlex.parallel.host_memory import is_on_host
from fiddlex.terminal.readable import readable_size

logger = logging.getLogger(__name__)

_SPARE = 0.05  # of a device's memory, which may be free in pieces that are too small


def has_room(tree: Any) -> bool:
    """Whether each device of the run has room for a copy of its part of `tree`, beside the most that it has used.

    All processes call this, and get the same answer. They have taken a step, so that the most that a device has used
    includes the temporaries of a step. Of a state that is partly in host memory, the copy is made on the host.
    """
    if any(map(is_on_host, jax.tree.leaves(tree))):
        return False
    sizes: Counter[jax.Device] = Counter()
    for x in jax.tree.leaves(tree):
        for device in x.sharding.addressable_devices:
            sizes[device] += math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    free = {device: _free_bytes(device) for device in sizes}
    spare = {device: (free[device] or 0.0) - size for device, size in sizes.items()}
    least = min(spare, key=lambda device: spare[device])
    known = None not in free.values()
    rooms = processes.gather("room for snapshots", spare[least] >= 0 if known else None)
    if None in rooms:
        return False
    room = all(rooms)
    logger.info(
        "A checkpoint is written from a copy on the %s: the state takes %s of a device, and %s are free.",
        "devices" if room else "host",
        readable_size(sizes[least]),
        readable_size(free[least] or 0.0),
    )
    return room


def _free_bytes(device: jax.Device) -> float | None:
    """The memory that a device has not used so far, less what is kept free; None where it does not tell."""
    stats = memory_stats(device)
    if not stats or not stats.keys() >= {"bytes_limit", "peak_bytes_in_use"}:
        return None
    return max((1 - _SPARE) * stats["bytes_limit"] - stats["peak_bytes_in_use"], 0.0)


def memory_stats(device: jax.Device) -> dict[str, int] | None:
    """What a device says of its memory; None for devices of the CPU."""
    stats: dict[str, int] | None = device.memory_stats()
    return stats


@jax.jit
def copied(tree: Any) -> Any:
    """A copy of the arrays on the devices that hold them; does not wait until it is made."""
    return jax.tree.map(jnp.copy, tree)
