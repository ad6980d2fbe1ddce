"""A run that goes on with fewer processes than it was started with: its mesh loses replicas, along `data` alone.

The global batch and its order stay, so gradients stay the same up to rounding: each replica that is left takes a larger
share of the batch, in more microbatches of the same size where that is possible. Devices per process stay.
"""

import dataclasses
import itertools
import math

from fiddlex.config import Config
from fiddlex.errors import ConfigError


def sizes(config: Config, number: int) -> list[int]:
    """Numbers of processes below `number` with which a run can go on, largest first; none if `config` is invalid."""
    return [size for size in range(number - 1, 0, -1) if _fits(config, number, size)]


def _fits(config: Config, number: int, size: int) -> bool:
    try:
        shrunk(config, number, size)
    except ConfigError:
        return False
    return True


def shrunk(config: Config, number: int, size: int) -> Config:
    """The config with which `size` of `number` processes go on; ConfigError when they cannot."""
    if size == number:
        return config
    data, rest = divmod(config.mesh.data * size, number)
    if rest or not data:
        raise ConfigError(
            f"mesh.data={config.mesh.data} on {number} processes cannot shrink to {size} of them: these have no whole "
            "number of replicas."
        )
    batch, before = config.data.global_batch_size, config.pipeline.num_microbatches
    if batch % data:
        raise ConfigError(f"data.global_batch_size={batch} does not divide by mesh.data={data}, the replicas left.")
    first = math.ceil(before * config.mesh.data / data)  # with more examples each, microbatches might not fit in memory
    for microbatches in itertools.count(first):
        if microbatches > batch // data:
            raise ConfigError(f"No number of microbatches fits data.global_batch_size={batch} and mesh.data={data}.")
        smaller = dataclasses.replace(
            config,
            mesh=dataclasses.replace(config.mesh, data=data),
            pipeline=dataclasses.replace(config.pipeline, num_microbatches=microbatches),
        )
        try:
            return smaller.validate()
        except ConfigError:
            continue
    raise AssertionError("unreachable")
