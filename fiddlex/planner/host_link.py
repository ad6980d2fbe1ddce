"""The bytes that cross the link between a device and its host in a step.

The link carries both directions at once, each at the full speed of `HostMemory.bandwidth`. The planner counts what
crosses beside the ticks of a pipeline in the simulator (`fiddlex.simulate.streaming`), and the rest as part of the
update.
"""

import math
from typing import NamedTuple

from fiddlex.config import Config
from fiddlex.costs.weight_memory import local_shape, master_shape, num_moments
from fiddlex.models.device_arrays import FLOAT32, ITEMSIZES
from fiddlex.models.registry import network_of
from fiddlex.models.spec import leaves


class LayerBytes(NamedTuple):
    """Bytes of a layer that wait on the host of each device (`pipeline.weights_memory=host`)."""

    weights: int  # the device's shard of the matrices, in the compute dtype
    # float32, of the matrices, reduced over `data`: with ZeRO-1, of the device's part of the master weights
    gradients: int


def layer_bytes(config: Config) -> LayerBytes:
    matrices = [each for each in leaves(network_of(config).layer) if each.decays]
    local, reduced = (sum(math.prod(shape(each, config)) for each in matrices) for shape in (local_shape, master_shape))
    return LayerBytes(local * ITEMSIZES[config.model.dtype], reduced * FLOAT32)


def update_bytes(config: Config, num_parameters: float, *, streamed_rows: int) -> float:
    """Bytes that an update with `optimizer.offload` moves between a device and its host, in the busier direction.

    Weight and moments come, and the weight once more for the compute weights; weight and moments go back. Where
    `streamed_rows` rows of layers wait on the host, their gradients come twice, for their norm and for the update, and
    their compute weights go.
    """
    optimizer, layer = config.optimizer, layer_bytes(config)
    # of all weights, few of which stay on the device
    state = num_parameters / (config.mesh.data if optimizer.zero1 else 1) * FLOAT32
    moments = num_moments(optimizer.name, optimizer.momentum)
    come = state * (2 + moments) + streamed_rows * 2 * layer.gradients
    go = state * (1 + moments) + streamed_rows * layer.weights
    return max(come, go)
