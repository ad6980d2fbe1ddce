"""What a model's weights, their gradients and the optimizer's state take on one device.

Each weight is named with the sizes that it has on a device of a mesh (`fiddlex.models`, sharded as
`fiddlex.parallel.sharding` says). Imports no jax.
"""

import math
from typing import NamedTuple

from fiddlex.config import Config
from fiddlex.simulate.backend import Backend

FLOAT32 = 4
NUM_KERNELS = 4  # of a layer
NUM_TOKEN_TYPES = 2
MIN_FACTORED_SIZE = 128  # below, Adafactor keeps all second moments (`fiddlex.train.blockwise`)
PAIR_CLASSES = 2


class Weight(NamedTuple):
    """A weight, of one layer where it belongs to layers.

    Attributes:
      shape: on the whole mesh.
      shards: the parts into which one of its dimensions is cut over `tensor` and `pipe`.
      axis: that dimension.
    """

    shape: tuple[int, ...]
    shards: int = 1
    axis: int = 0

    @property
    def size(self) -> int:
        """Elements on a device."""
        return math.prod(self.shape) // self.shards

    def master_shape(self, data: int) -> tuple[int, ...]:
        """The master weight's shape on a device, its largest dimension that can be cut into `data` parts so cut."""
        shape = list(self.shape)
        shape[self.axis] //= self.shards
        fitting = [i for i, size in enumerate(shape) if size % data == 0]
        if fitting:
            shape[max(fitting, key=shape.__getitem__)] //= data
        return tuple(shape)

    @property
    def factors(self) -> int:
        """Elements of Adafactor's factors, whole on every device; 0: second moments are not factored."""
        *_, second, largest = (0, *sorted(self.shape))
        size = math.prod(self.shape)
        return size // largest + size // second if second >= MIN_FACTORED_SIZE else 0


def layer_weights(config: Config) -> list[Weight]:
    """Those of one layer, kernels first."""
    model, tensor = config.model, config.mesh.tensor
    hidden, units, heads, size = model.hidden_size, model.mlp_size, model.num_heads, model.head_size
    return [
        Weight((hidden, 3, heads, size), tensor, 2),
        Weight((heads, size, hidden), tensor),
        Weight((hidden, units), tensor, 1),
        Weight((units, hidden), tensor),
        Weight((3, heads, size), tensor, 1),
        Weight((units,), tensor),
        *[Weight((hidden,))] * 6,  # scales and biases of two norms, and biases after the reductions
    ]


def outer_weights(config: Config) -> list[Weight]:
    """Those of embedding and head."""
    model, shards, rows = config.model, config.mesh.vocab_shards, config.padded_vocab_size
    hidden = model.hidden_size
    vector, matrix = Weight((hidden,)), Weight((hidden, hidden))
    weights = [Weight((rows, hidden), shards), Weight((model.seq_len, hidden)), vector, vector]
    if model.family == "bert":
        weights.append(Weight((NUM_TOKEN_TYPES, hidden)))
    if model.task.startswith("mlm"):
        weights += [matrix, vector, vector, vector, Weight((rows,), shards)]
    classes = {
        "mlm_nsp": PAIR_CLASSES,
        "mlm_sop": PAIR_CLASSES,
        "classification": len(config.data.classes),
        "multiple_choice": 1,
    }.get(model.task, 0)
    if classes:
        weights += [matrix, vector, Weight((hidden, classes))]
    if classes > 1:
        weights.append(Weight((classes,)))
    return weights


def num_moments(optimizer: str, momentum: float) -> int:
    """Numbers that an optimizer keeps of each weight; Adafactor's, one for a row or a column, are not among them.

    Args:
      optimizer: its name.
      momentum: of sgd, which keeps none without.
    """
    return {"adamw": 2, "adam": 2, "lamb": 2, "sgd": int(momentum > 0), "adafactor": 0}[optimizer]


def device_parameters(config: Config, rows: int) -> int:
    """Weights that a device with so many rows of layers computes with."""
    sizes = (sum(weight.size for weight in weights) for weights in (layer_weights(config), outer_weights(config)))
    layer, outer = sizes
    return rows * layer + outer


class WeightBytes(NamedTuple):
    """Bytes on one device.

    Attributes:
      layers: of the layers in float32.
      kernels: of those the part that products take.
      outer: of embedding and head in float32.
      reduced_layers: of the layers' gradients, reduced over `data` onto the shards of the master weights.
      reduced_outer: likewise of embedding and head.
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
    layer, outer = layer_weights(config), outer_weights(config)
    data = config.mesh.data if config.optimizer.zero1 else 1
    layer_shapes, outer_shapes = ([weight.master_shape(data) for weight in weights] for weights in (layer, outer))
    tiled = [backend.tiled((rows, *shape)) for shape in layer_shapes] + list(map(backend.tiled, outer_shapes))
    optimizer = config.optimizer
    state = num_moments(optimizer.name, optimizer.momentum) * sum(tiled)
    if optimizer.name == "adafactor":
        # Factors are whole on every device, those of other pipe ranks' layers included.
        factors = [weight.factors * rows * config.mesh.pipe for weight in layer] + [weight.factors for weight in outer]
        state = sum(factor or moment for factor, moment in zip(factors, tiled, strict=True))
    return WeightBytes(
        layers=FLOAT32 * rows * sum(weight.size for weight in layer),
        kernels=FLOAT32 * rows * sum(weight.size for weight in layer[:NUM_KERNELS]),
        outer=FLOAT32 * sum(weight.size for weight in outer),
        reduced_layers=FLOAT32 * rows * sum(map(math.prod, layer_shapes)),
        reduced_outer=FLOAT32 * sum(map(math.prod, outer_shapes)),
        master=FLOAT32 * sum(tiled),
        optimizer=FLOAT32 * state,
    )
