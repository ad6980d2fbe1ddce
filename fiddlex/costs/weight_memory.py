"""What a model's weights, their gradients and the optimizer's state take on one device.

A fold over the parameters of `fiddlex.models.spec`, sharded as `fiddlex.parallel.axes` says.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from fiddlex.config import Config
from fiddlex.costs.backend import Backend
from fiddlex.models.registry import describe
from fiddlex.models.spec import Parameter, leaves
from fiddlex.parallel.axes import largest_dimension, num_shards

FLOAT32 = 4
MIN_FACTORED_SIZE = 128  # below, Adafactor keeps all second moments (`fiddlex.train.step.blockwise`)


def local_shape(parameter: Parameter, config: Config) -> tuple[int, ...]:
    """The sizes that a device has of a weight that it computes with; the vocabulary is padded."""
    sizes = parameter.padded(config.padded_vocab_size)
    return tuple(size // num_shards(axis, config.mesh) for size, axis in zip(sizes, parameter.axes, strict=True))


def master_shape(parameter: Parameter, config: Config) -> tuple[int, ...]:
    """The sizes that a device has of a master weight: with ZeRO-1 its part of what it computes with."""
    shape, data = list(local_shape(parameter, config)), config.mesh.data if config.optimizer.zero1 else 1
    if (dimension := largest_dimension(shape, data)) is not None:
        shape[dimension] //= data
    return tuple(shape)


def num_factors(parameter: Parameter, config: Config) -> int:
    """The elements of the factors of Adafactor's second moments, whole on every device; 0 where it keeps all moments.

    Whether moments are factored is decided by the sizes without padding, as in `fiddlex.train.step.blockwise`.
    """
    by_size = sorted(range(len(parameter.shape)), key=parameter.shape.__getitem__)
    if len(by_size) < 2 or parameter.shape[by_size[-2]] < MIN_FACTORED_SIZE:
        return 0
    padded = parameter.padded(config.padded_vocab_size)
    return sum(math.prod(padded) // padded[dimension] for dimension in by_size[-2:])


def num_moments(optimizer: str, momentum: float) -> int:
    """How many numbers an optimizer keeps of each weight; Adafactor's factors are not among them.

    Args:
      optimizer: its name.
      momentum: that of sgd, which keeps nothing without.
    """
    return {"adamw": 2, "adam": 2, "lamb": 2, "sgd": int(momentum > 0), "adafactor": 0}[optimizer]


def device_parameters(config: Config, rows: int) -> int:
    """The number of weights that a device with so many rows of layers computes with."""
    network = describe(config)
    return rows * _elements(leaves(network.layer), config) + _elements(network.outer, config)


class WeightBytes(NamedTuple):
    """Bytes on one device.

    Attributes:
      layers: of the layers' weights in float32.
      kernels: of those among them that are factors of matrix products.
      outer: of the weights of embedding and head in float32.
      reduced_layers: of the layers' gradients, reduced over `data` onto the shards of the master weights.
      reduced_outer: of the gradients of embedding and head, reduced in the same way.
      master: of the master weights.
      optimizer: of the optimizer's state.
    """

    layers: int
    kernels: int
    outer: int
    reduced_layers: int
    reduced_outer: int
    master: int
    optimizer: int


def weight_bytes(config: Config, rows: int, backend: Backend) -> WeightBytes:
    """The weights of a model on a device with so many rows of layers; what is in the train state, with its padding."""
    network, optimizer = describe(config), config.optimizer
    layer, outer = list(leaves(network.layer)), network.outer
    layer_shapes, outer_shapes = ([master_shape(each, config) for each in part] for part in (layer, outer))
    tiled = [backend.tiled((rows, *shape)) for shape in layer_shapes] + list(map(backend.tiled, outer_shapes))
    state = num_moments(optimizer.name, optimizer.momentum) * sum(tiled)
    if optimizer.name == "adafactor":
        # Factors are whole on every device, those of other pipe ranks' layers included.
        factors = [num_factors(each, config) * rows * config.mesh.pipe for each in layer]
        factors += [num_factors(each, config) for each in outer]
        state = sum(factor or moment for factor, moment in zip(factors, tiled, strict=True))
    return WeightBytes(
        layers=FLOAT32 * rows * _elements(layer, config),
        kernels=FLOAT32 * rows * _elements((each for each in layer if each.product), config),
        outer=FLOAT32 * _elements(outer, config),
        reduced_layers=FLOAT32 * rows * sum(map(math.prod, layer_shapes)),
        reduced_outer=FLOAT32 * sum(map(math.prod, outer_shapes)),
        master=FLOAT32 * sum(tiled),
        optimizer=FLOAT32 * state,
    )


def _elements(parameters: Iterable[Parameter], config: Config) -> int:
    """The elements that a device has of weights that it computes with."""
    return sum(math.prod(local_shape(each, config)) for each in parameters)
