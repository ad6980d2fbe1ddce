"""The memory of a model's weights, their gradients and the optimizer state on one device.

The functions sum over the parameters of `fiddlex.models.spec`, sharded by the rules of `fiddlex.parallel.axes`.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from fiddlex.config import Config
from fiddlex.config.user_code.own_rules import rule_function
from fiddlex.config.values.schedule_source import is_function
from fiddlex.costs.backend import Backend
from fiddlex.models.device_arrays import ITEMSIZES
from fiddlex.models.registry import network_of
from fiddlex.models.spec import Parameter, leaves
from fiddlex.parallel.axes import largest_dimension, num_shards

FLOAT32 = 4
MIN_FACTORED_SIZE = 128  # below this size Adafactor stores all second moments (`fiddlex.train.step.blockwise`)


def local_shape(parameter: Parameter, config: Config) -> tuple[int, ...]:
    """The shape of a device's shard of a compute weight, with the vocabulary padded."""
    sizes = parameter.padded(config.padded_vocab_size)
    return tuple(size // num_shards(axis, config.mesh) for size, axis in zip(sizes, parameter.axes, strict=True))


def master_shape(parameter: Parameter, config: Config) -> tuple[int, ...]:
    """The shape of a device's shard of a master weight; with ZeRO-1, it is a part of `local_shape` over `data`."""
    shape, data = list(local_shape(parameter, config)), config.mesh.data if config.optimizer.zero1 else 1
    if (dimension := largest_dimension(shape, data)) is not None:
        shape[dimension] //= data
    return tuple(shape)


def num_factors(parameter: Parameter, config: Config) -> int:
    """The elements in Adafactor's factors of second moments, all on every device; 0 where it stores all moments."""
    # the sizes without padding decide, as in `fiddlex.train.step.blockwise`
    by_size = sorted(range(len(parameter.shape)), key=parameter.shape.__getitem__)
    if len(by_size) < 2 or parameter.shape[by_size[-2]] < MIN_FACTORED_SIZE:
        return 0
    padded = parameter.padded(config.padded_vocab_size)
    return sum(math.prod(padded) // padded[dimension] for dimension in by_size[-2:])


def num_moments(optimizer: str, momentum: float, *, matrix: bool = True) -> int:
    """How many numbers an optimizer stores for each weight, without Adafactor's factors.

    With `matrix` the weights are the matrices of layers, as most weights are. Without `momentum`, sgd stores nothing.
    """
    if is_function(optimizer):
        return rule_function(optimizer).moments
    if optimizer == "sgd":
        return int(momentum > 0)
    if optimizer == "muon":
        return 1 if matrix else 2
    return {"adafactor": 0, "lion": 1, "adan": 4}.get(optimizer, 2)


def device_parameters(config: Config, rows: int) -> int:
    """The number of weights with which a device computes, where it holds `rows` rows of the stacked layers."""
    network = network_of(config)
    return rows * _elements(leaves(network.layer), config) + _elements(network.outer, config)


class WeightBytes(NamedTuple):
    """Bytes on one device."""

    layers: int  # the layers' weights in float32
    kernels: int  # the part of `layers` that matrix products use
    outer: int  # the weights of embedding and head in float32
    reduced_layers: int  # the gradients of `layers`, reduced over `data` onto the shards of the master weights
    reduced_outer: int  # the gradients of `outer`, reduced in the same way
    master: int  # master weights, but those in `host`
    optimizer: int  # optimizer state, but that in `host`
    host: int = 0  # master weights and optimizer state in the memory of the host (`optimizer.offload`)
    streamed: int = 0  # what the device holds of `host` at a time while it updates them
    # what an update of whole weights holds of all layers, by a function of the user's that is not elementwise: weights,
    # gradients and state before it, and as much after it
    apart: int = 0
    host_weights: int = 0  # the layers' compute weights and reduced gradients on the host (`pipeline.weights_memory`)


class _Stored(NamedTuple):
    """What the train state stores of one weight, or of one weight of all layers."""

    rows: int  # number of layers; 1 for a weight outside the layers
    size: int  # number of elements of the master weight, with the backend's padding
    moments: int  # how many numbers the optimizer stores for each element
    factors: int  # number of elements of Adafactor's factors
    offloaded: bool  # whether weight and moments are in the memory of the host

    @classmethod
    def of(cls, parameter: Parameter, config: Config, backend: Backend, *, rows: int = 0) -> "_Stored":
        """What is stored of a weight that each device has in `rows` layers; 0: of a weight outside the layers."""
        optimizer, shape = config.optimizer, master_shape(parameter, config)
        is_matrix = bool(rows) and parameter.matrix is not None
        moments, factors = num_moments(optimizer.name, optimizer.momentum, matrix=is_matrix), 0
        if optimizer.name == "adafactor":
            # Every device holds the whole factors, including those of other pipe ranks' layers.
            factors = num_factors(parameter, config) * (rows * config.mesh.pipe if rows else 1)
            moments = 0 if factors else 1
        size = backend.tiled((rows, *shape) if rows else shape)
        return cls(max(rows, 1), size, moments, factors, optimizer.offload and parameter.decays)

    @property
    def whole(self) -> int:
        """Number of elements of weight and moments."""
        return self.size * (1 + self.moments)

    def streamed(self, backend: Backend, *, with_gradient: bool) -> int:
        """Number of elements that the device holds at a time while it updates the weight from the host."""
        # a row and the next one, and on GPUs the results of a third; where there is one row, it and its result
        held = 3 if backend.platform == "gpu" and self.rows > 1 else 2
        # a gradient that comes from the host has no result
        gradients = 2 * self.size if with_gradient and self.rows > 1 else 0
        return self.offloaded * (held * self.whole + gradients) // self.rows


def weight_bytes(config: Config, rows: int, backend: Backend) -> WeightBytes:
    """Bytes of a model's weights on a device that holds `rows` rows of the stacked layers.

    The bytes of the train state (`master`, `optimizer` and `host`) include the backend's padding.
    """
    network = network_of(config)
    layer, outer = list(leaves(network.layer)), list(network.outer)
    of_layers = [_Stored.of(each, config, backend, rows=rows) for each in layer]
    stored = of_layers + [_Stored.of(each, config, backend) for each in outer]
    name = config.optimizer.name
    of_all_ranks = config.mesh.pipe if is_function(name) and not rule_function(name).elementwise else 0
    here = [each for each in stored if not each.offloaded]
    return WeightBytes(
        layers=FLOAT32 * rows * _elements(layer, config),
        kernels=FLOAT32 * rows * _elements((each for each in layer if each.matrix), config),
        outer=FLOAT32 * _elements(outer, config),
        reduced_layers=FLOAT32 * rows * sum(math.prod(master_shape(each, config)) for each in layer),
        reduced_outer=FLOAT32 * sum(math.prod(master_shape(each, config)) for each in outer),
        master=FLOAT32 * sum(each.size for each in here),
        optimizer=FLOAT32 * (sum(each.size * each.moments for each in here) + sum(each.factors for each in stored)),
        host=FLOAT32 * sum(each.whole for each in stored if each.offloaded),
        streamed=FLOAT32 * max(each.streamed(backend, with_gradient=config.pipeline.streams) for each in stored),
        apart=FLOAT32 * 2 * of_all_ranks * sum(each.whole + each.size for each in of_layers),
        host_weights=_host_weights(config, rows, layer, backend) if config.pipeline.streams else 0,
    )


def _host_weights(config: Config, rows: int, layer: Iterable[Parameter], backend: Backend) -> int:
    """`WeightBytes.host_weights`: of the matrices, since vectors stay on the device."""
    matrices = [each for each in layer if each.decays]
    compute = sum(backend.tiled((rows, *local_shape(each, config))) for each in matrices)
    reduced = sum(backend.tiled((rows, *master_shape(each, config))) for each in matrices)
    return compute * ITEMSIZES[config.model.dtype] + reduced * FLOAT32


def _elements(parameters: Iterable[Parameter], config: Config) -> int:
    """The number of elements in a device's shards of compute weights."""
    return sum(math.prod(local_shape(each, config)) for each in parameters)
