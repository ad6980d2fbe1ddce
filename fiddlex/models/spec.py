"""What a network is, written once: its parameters, and what its layers and its head compute.

Each family gives the `Network` of a config (`fiddlex.models.families`). All that is told of a network follows from it:
initial weights, sharding, names in checkpoints, the number of parameters, operations, memory, and the planner's work.
Sizes are those of the whole network; the parts that one device has follow from the logical axes of parameters and from
`Product.split`.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from fiddlex.models.task_sizes import Task
from fiddlex.parallel.axes import LogicalAxes


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One weight; of a layer's, one layer's.

    Attributes:
      shape: its sizes, without the rows that pad the vocabulary.
      axes: the logical axis of each dimension (`fiddlex.parallel.axes`), None for a dimension that is never sharded.
      std: the standard deviation of the normal distribution, around 0, from which initial values are drawn; 0: none is
        drawn.
      value: the initial value of all elements where none is drawn.
      decays: whether weight decay applies: to matrices and tables, not to biases and the scales of norms.
      product: whether it is a factor of a matrix product in every layer's pass; an embedding's table is none.
    """

    shape: tuple[int, ...]
    axes: LogicalAxes
    std: float = 0.0
    value: float = 0.0
    decays: bool = False
    product: bool = False

    @property
    def size(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)

    def padded(self, vocab_rows: int) -> tuple[int, ...]:
        """Its sizes where the dimension `vocab` has so many rows."""
        sizes = zip(self.shape, self.axes, strict=True)
        return tuple(vocab_rows if axis == "vocab" else size for size, axis in sizes)


Parameters = dict[str, Any]  # a nested dictionary whose leaves are `Parameter`s


def leaves(parameters: Parameters) -> Iterator[Parameter]:
    """The parameters of a nested dictionary, in its order."""
    for each in parameters.values():
        if isinstance(each, Parameter):
            yield each
        else:
            yield from leaves(each)


def linear(shape: tuple[int, ...], axes: LogicalAxes, *, num_inputs: int, std: float, bias: bool = True) -> Parameters:
    """A kernel and, if asked for, a bias of zeros.

    Args:
      shape: the kernel's sizes: its inputs, then its outputs.
      axes: the kernel's logical axes.
      num_inputs: how many of the dimensions are inputs; the bias has the others.
      std: the standard deviation of the kernel's initial values.
      bias: whether there is a bias.
    """
    parameters = {"kernel": Parameter(shape, axes, std, decays=True, product=True)}
    return parameters | ({"bias": Parameter(shape[num_inputs:], axes[num_inputs:])} if bias else {})


def table(rows: int, hidden: int, axis: str, *, std: float) -> Parameter:
    """A table with a row of the hidden size for each token, position or the like, which `axis` names."""
    return Parameter((rows, hidden), (axis, "hidden"), std, decays=True)


def norm(hidden: int, *, bias: bool = True) -> Parameters:
    """The scale of a norm, ones, and of a LayerNorm its bias, zeros."""
    scale = {"scale": Parameter((hidden,), ("hidden",), value=1.0)}
    return scale | ({"bias": Parameter((hidden,), ("hidden",))} if bias else {})


@dataclasses.dataclass(frozen=True)
class Norm:
    """A norm over the hidden dimension; it keeps its input, in the compute dtype, for the backward pass."""


@dataclasses.dataclass(frozen=True)
class Product:
    """The product of each position's vector and a kernel; it keeps its input, in the dtype that products take.

    Attributes:
      inputs: the length of the vectors.
      outputs: the number of the kernel's columns.
      split: which of the two tensor parallelism cuts: "outputs", "inputs"; in a head "vocab" for outputs that are cut
        over `pipe` too, and "" for a product that every device does whole.
      positions: in a head, at which positions: "scored" (`Task.num_scored`) or "first", one of each sequence.
    """

    inputs: int
    outputs: int
    split: str = ""
    positions: str = ""


@dataclasses.dataclass(frozen=True)
class Attention:
    """Attention between the positions of a sequence; it keeps queries, keys and values.

    What it keeps besides, probabilities or of the flash kernel one sum for each row of them, and what of it is computed
    again, is known to those who count (`fiddlex.costs.layer_memory`, `fiddlex.costs.work`).

    Attributes:
      heads: the number of query heads.
      head_size: the width of a head.
      causal: whether a position sees no position after it.
    """

    heads: int
    head_size: int
    causal: bool

    @property
    def width(self) -> int:
        """The width of all heads together."""
        return self.heads * self.head_size


@dataclasses.dataclass(frozen=True)
class Activation:
    """An elementwise function between two products; it keeps its inputs, in the compute dtype.

    Attributes:
      units: the width of its output.
      num_inputs: how many arrays of that width it takes: 1 for GELU, 2 where a gate multiplies a value.
    """

    units: int
    num_inputs: int = 1


@dataclasses.dataclass(frozen=True)
class Residual:
    """The end of a branch: its output, with dropout, is added to the residual stream. Dropout keeps its mask."""


Operation = Norm | Product | Attention | Activation | Residual
Branch = tuple[Operation, ...]  # what is computed from the residual stream and added to it, in order


@dataclasses.dataclass(frozen=True)
class Network:
    """The description of one model.

    Attributes:
      task: the sizes of what it is trained to do.
      embedding: the parameters before the layers.
      layer: the parameters of one layer.
      head: the parameters after the layers, besides those of the embedding that the head uses too.
      num_layers: how many layers there are, all alike.
      hidden: the width of the residual stream.
      branches: what a layer computes, one branch after another.
      scoring: the products of the head.
    """

    task: Task
    embedding: Parameters
    layer: Parameters
    head: Parameters
    num_layers: int
    hidden: int
    branches: tuple[Branch, ...]
    scoring: tuple[Product, ...]

    @property
    def parts(self) -> Parameters:
        """The parameters under the names that the weights have; of `layers` those of one."""
        return {"embedding": self.embedding, "layers": self.layer, "head": self.head}

    @property
    def outer(self) -> list[Parameter]:
        """The parameters of embedding and head."""
        return [*leaves(self.embedding), *leaves(self.head)]

    @property
    def operations(self) -> list[Operation]:
        """What a layer computes, all branches in a row."""
        return [operation for branch in self.branches for operation in branch]

    @property
    def attention(self) -> Attention:
        """The attention of a layer."""
        (found,) = (each for each in self.operations if isinstance(each, Attention))
        return found
