"""The description of a network, written once: its parameters, and what its layers and its head compute.

Initial weights, sharding, names in checkpoints, the number of parameters, flops, memory and the planner's work are
derived from it. Sizes are those of the whole network; the logical axes of parameters and `Product.split` determine the
part that one device has.
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

    Further dimensions number separate matrices: the kernel of queries, keys and values stores three.
    """

    inputs: tuple[int, ...]  # indices of the dimensions that the product sums over
    outputs: tuple[int, ...]  # indices of the dimensions of the product's result


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One weight; a weight of the layers is described for a single layer."""

    shape: tuple[int, ...]  # without the rows that pad the vocabulary
    # the logical axis of each dimension (`fiddlex.parallel.axes`), None for a dimension that is never sharded
    axes: LogicalAxes
    # initial values are normal with mean 0 and this standard deviation; 0: every element starts at `value`
    std: float = 0.0
    value: float = 0.0
    decays: bool = False  # whether weight decay applies: to matrices and tables, not to biases and the scales of norms
    # inputs and outputs of a product's kernel; None for any other weight, also for the table of an embedding
    matrix: Matrix | None = None
    # whether each tensor rank computes only a part of the gradient, although it has the whole weight
    partial: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def padded(self, vocab_rows: int) -> tuple[int, ...]:
        """The sizes of the weight when the dimension `vocab` has `vocab_rows` rows."""
        sizes = zip(self.shape, self.axes, strict=True)
        return tuple(vocab_rows if axis == "vocab" else size for size, axis in sizes)


Parameters = dict[str, Any]  # a nested dictionary whose leaves are `Parameter`s


def leaves(parameters: Parameters) -> Iterator[Parameter]:
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
    """A norm; it saves its input, in the compute dtype, for the backward pass."""

    # 0: the norm of the residual stream; else how many heads it normalises, which tensor parallelism splits
    heads: int = 0
    head_size: int = 0  # the width of a head
    replicas: int = 1  # the number of tensor ranks that compute the same head

    @property
    def width(self) -> int:
        """The width of all heads together, each as often as tensor ranks compute it; 0 for the residual stream."""
        return self.heads * self.head_size * self.replicas


@dataclasses.dataclass(frozen=True)
class Product:
    """The product of each position's vector and a kernel; it saves its input, in the dtype of products' operands."""

    inputs: int  # the length of the vectors
    outputs: int  # the number of the kernel's columns
    # what tensor parallelism shards: "outputs", "inputs", in a head "vocab" (over `pipe` × `tensor`); "": nothing
    split: str = ""
    # in a head: "scored" (`Task.num_scored`) or "first", of each sequence; "", in a layer: every position
    positions: str = ""
    shares_input: bool = False  # whether the product takes the same input as the product before it, which has saved it
    replicas: int = 1  # with the split "outputs": the number of tensor ranks that compute the same outputs
    # in a layer: the part of `pipeline.recompute` ("norms", "gelu") that makes the input again; "": it is always saved
    made_by: str = ""


@dataclasses.dataclass(frozen=True)
class Attention:
    """Attention between the positions of a sequence; it saves queries, keys, values and probabilities.

    The flash kernel saves one sum for each row of probabilities instead. `fiddlex.costs.layer_memory` and
    `fiddlex.costs.work` count this, and what of attention the backward pass recomputes.
    """

    heads: int  # of queries
    head_size: int
    causal: bool  # whether a position attends only to itself and to earlier positions
    kv_heads: int = 0  # of keys and of values, each for equally many query heads; 0: as many as `heads`
    kv_replicas: int = 1  # the number of tensor ranks that hold the same keys and values

    @property
    def width(self) -> int:
        return self.heads * self.head_size

    @property
    def kv_width(self) -> int:
        """The width of the heads of keys together, each as often as tensor ranks hold it."""
        return (self.kv_heads or self.heads) * self.head_size * self.kv_replicas


@dataclasses.dataclass(frozen=True)
class Activation:
    """An elementwise function between two products; it saves its inputs, in the compute dtype."""

    units: int  # the width of the function's output
    num_inputs: int = 1  # of width `units`: 1 for GELU, 2 where a gate multiplies a value


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
    """The description of one model."""

    task: Task
    embedding: Parameters  # used before the layers
    layer: Parameters  # of one layer
    head: Parameters  # used after the layers, except those that the head shares with the embedding
    num_layers: int  # all have the same description
    hidden: int  # the width of the residual stream
    branches: tuple[Branch, ...]  # of a layer, in the order in which the layer computes them
    scoring: tuple[Product, ...]  # the matrix products of the head

    @property
    def parts(self) -> Parameters:
        """The parameters under the keys of the weights; `layers` has the parameters of one layer."""
        return {"embedding": self.embedding, "layers": self.layer, "head": self.head}

    @property
    def outer(self) -> list[Parameter]:
        return [*leaves(self.embedding), *leaves(self.head)]

    @property
    def operations(self) -> list[Operation]:
        """The operations of a layer, all branches one after another."""
        return [operation for branch in self.branches for operation in branch]

    @property
    def attention(self) -> Attention:
        (found,) = (each for each in self.operations if isinstance(each, Attention))
        return found
