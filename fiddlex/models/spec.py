"""The description of a network, written once: its parameters, and what its layers and its head compute.

Each family gives the `Network` of a config (`fiddlex.models.descriptions`). Everything else about a network is derived
from it: initial weights, sharding, names in checkpoints, the number of parameters, flops, memory, and the planner's
work. Sizes are those of the whole network; the logical axes of parameters and `Product.split` determine the part that
one device has.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from fiddlex.models.task_sizes import Task
from fiddlex.parallel.axes import LogicalAxes


@dataclasses.dataclass(frozen=True)
class Matrix:
    """Which dimensions of a kernel are the inputs of its matrix product, and which are the outputs.

    A kernel with further dimensions stores several matrices, one for each index of these dimensions: the kernel of
    queries, keys and values stores three.

    Attributes:
      inputs: indices of the dimensions that the product sums over.
      outputs: indices of the dimensions of the product's result.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One weight; a weight of the layers is described for a single layer.

    Attributes:
      shape: the sizes of the weight, without the rows that pad the vocabulary.
      axes: the logical axis of each dimension (`fiddlex.parallel.axes`), None for a dimension that is never sharded.
      std: the standard deviation of the normal distribution with mean 0 from which initial values are drawn; 0: every
        element starts at `value`.
      value: the initial value when `std` is 0.
      decays: whether weight decay applies to the weight; it does to matrices and tables, not to biases and the scales
        of norms.
      matrix: the inputs and outputs of the kernel of a matrix product; None for any other weight, also for the table of
        an embedding.
      partial: whether each tensor rank computes only a part of the weight's gradient, although it has the whole weight.
    """

    shape: tuple[int, ...]
    axes: LogicalAxes
    std: float = 0.0
    value: float = 0.0
    decays: bool = False
    matrix: Matrix | None = None
    partial: bool = False

    @property
    def size(self) -> int:
        """The number of elements of the weight."""
        return math.prod(self.shape)

    def padded(self, vocab_rows: int) -> tuple[int, ...]:
        """The sizes of the weight when the dimension `vocab` has `vocab_rows` rows."""
        sizes = zip(self.shape, self.axes, strict=True)
        return tuple(vocab_rows if axis == "vocab" else size for size, axis in sizes)


Parameters = dict[str, Any]  # a nested dictionary whose leaves are `Parameter`s


def leaves(parameters: Parameters) -> Iterator[Parameter]:
    """The parameters of a nested dictionary, in the dictionary's order."""
    for each in parameters.values():
        if isinstance(each, Parameter):
            yield each
        else:
            yield from leaves(each)


def linear(
    shape: tuple[int, ...], axes: LogicalAxes, *, num_inputs: int, std: float, bias: bool = True, separate: int = 0
) -> Parameters:
    """A kernel and, if asked for, a bias of zeros.

    Args:
      shape: the kernel's sizes: its inputs, then its outputs.
      axes: the kernel's logical axes.
      num_inputs: how many of the kernel's dimensions are inputs; the bias has the other dimensions.
      separate: how many dimensions after the inputs number separate matrices (`Matrix`).
      std: the standard deviation of the kernel's initial values.
      bias: whether there is a bias.
    """
    matrix = Matrix(tuple(range(num_inputs)), tuple(range(num_inputs + separate, len(shape))))
    parameters = {"kernel": Parameter(shape, axes, std, decays=True, matrix=matrix)}
    return parameters | ({"bias": Parameter(shape[num_inputs:], axes[num_inputs:])} if bias else {})


def table(rows: int, hidden: int, axis: str, *, std: float) -> Parameter:
    """A table with one row of the hidden size per token, position or the like; `axis` is the rows' logical axis."""
    return Parameter((rows, hidden), (axis, "hidden"), std, decays=True)


def norm(hidden: int, *, bias: bool = True) -> Parameters:
    """The scale of a norm, initially ones, and if `bias` is true (LayerNorm) the bias, initially zeros."""
    scale = {"scale": Parameter((hidden,), ("hidden",), value=1.0)}
    return scale | ({"bias": Parameter((hidden,), ("hidden",))} if bias else {})


@dataclasses.dataclass(frozen=True)
class Norm:
    """A norm; it saves its input, in the compute dtype, for the backward pass.

    Attributes:
      heads: 0: the norm of the residual stream; else it normalises each of so many heads, which tensor parallelism
        splits.
      head_size: the width of a head.
      replicas: the number of tensor ranks that compute the same head.
    """

    heads: int = 0
    head_size: int = 0
    replicas: int = 1

    @property
    def width(self) -> int:
        """The width of all heads together, each as often as tensor ranks compute it; 0 for the residual stream."""
        return self.heads * self.head_size * self.replicas


@dataclasses.dataclass(frozen=True)
class Product:
    """The product of each position's vector and a kernel; it saves its input, in the dtype of the operands of products.

    Attributes:
      inputs: the length of the vectors.
      outputs: the number of the kernel's columns.
      split: which of the kernel's dimensions tensor parallelism shards: "outputs" or "inputs"; in a head, "vocab" for
        outputs sharded over `pipe` × `tensor`. "": every device computes the whole product.
      positions: in a head, the positions that the product takes: "scored" (`Task.num_scored`) or "first", the first
        position of each sequence; "", in a layer: every position.
      shares_input: whether the product takes the same input as the product before it, which has saved it.
      replicas: with the split "outputs", the number of tensor ranks that compute the same outputs.
      made_by: in a layer, the part of `pipeline.recompute` under which the product saves no input, since the backward
        pass makes it again (`fiddlex.models.products.Input`): "norms" after a norm, "gelu" after an activation
        function; "": the product always saves its input.
    """

    inputs: int
    outputs: int
    split: str = ""
    positions: str = ""
    shares_input: bool = False
    replicas: int = 1
    made_by: str = ""


@dataclasses.dataclass(frozen=True)
class Attention:
    """Attention between the positions of a sequence; it saves queries, keys and values.

    Attention also saves its probabilities, or in the flash kernel one sum for each row of them.
    `fiddlex.costs.layer_memory` and `fiddlex.costs.work` count this, and what of attention the backward pass
    recomputes.

    Attributes:
      heads: the number of query heads.
      head_size: the width of a head.
      causal: whether a position attends only to itself and to earlier positions.
      kv_heads: the number of heads of keys and of values, each for equally many query heads; 0: as many as `heads`.
      kv_replicas: the number of tensor ranks that hold the same keys and values.
    """

    heads: int
    head_size: int
    causal: bool
    kv_heads: int = 0
    kv_replicas: int = 1

    @property
    def width(self) -> int:
        """The width of all query heads together."""
        return self.heads * self.head_size

    @property
    def kv_width(self) -> int:
        """The width of the heads of keys together, each as often as tensor ranks hold it."""
        return (self.kv_heads or self.heads) * self.head_size * self.kv_replicas


@dataclasses.dataclass(frozen=True)
class Activation:
    """An elementwise function between two products; it saves its inputs, in the compute dtype.

    Attributes:
      units: the width of the function's output.
      num_inputs: how many arrays of width `units` the function takes: 1 for GELU, 2 where a gate multiplies a value.
    """

    units: int
    num_inputs: int = 1


MASK_ROW = 128  # bytes of a row of a saved mask (`fiddlex.models.dropout`)


@dataclasses.dataclass(frozen=True)
class Residual:
    """The end of a branch: adds the branch's output, after dropout, to the residual stream.

    Dropout saves its mask, a bit for each element in whole rows of `MASK_ROW` bytes.
    """


Operation = Norm | Product | Attention | Activation | Residual
Branch = tuple[Operation, ...]  # the operations of a branch in order; their result is added to the residual stream


@dataclasses.dataclass(frozen=True)
class Network:
    """The description of one model.

    Attributes:
      task: the sizes of the training task, such as how many positions of an example are scored (`Task`).
      embedding: the parameters that are used before the layers.
      layer: the parameters of one layer.
      head: the parameters that are used after the layers, except those that the head shares with the embedding.
      num_layers: how many layers there are; all have the same description.
      hidden: the width of the residual stream.
      branches: the branches of a layer, in the order in which the layer computes them.
      scoring: the matrix products of the head.
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
        """The parameters under the keys of the weights; `layers` has the parameters of one layer."""
        return {"embedding": self.embedding, "layers": self.layer, "head": self.head}

    @property
    def outer(self) -> list[Parameter]:
        """The parameters of the embedding and of the head."""
        return [*leaves(self.embedding), *leaves(self.head)]

    @property
    def operations(self) -> list[Operation]:
        """The operations of a layer, all branches one after another."""
        return [operation for branch in self.branches for operation in branch]

    @property
    def attention(self) -> Attention:
        """The attention operation of a layer."""
        (found,) = (each for each in self.operations if isinstance(each, Attention))
        return found
