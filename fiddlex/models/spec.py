"""The description of a network, written once: its parameters, and what its layers and its head compute.

Initial weights, sharding, names in checkpoints, the number of parameters, flops, memory and the planner's work are
derived from it. Sizes are those of the whole network; the logical axes of parameters and `Product.split` determine the
part that one device has. A new kind of operation says in its methods what it takes on a device.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

from fiddlex.config.values.recompute import FULL
from fiddlex.models.device_arrays import WORD, DeviceArrays, Saved
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
    axes: LogicalAxes  # of each dimension (`fiddlex.parallel.axes`); None for one that is never sharded
    std: float = 0.0  # of the normal initial values, of mean 0; with 0 every element starts at `value`
    value: float = 0.0
    decays: bool = False  # whether weight decay applies: to matrices and tables, not to biases and the scales of norms
    matrix: Matrix | None = None  # of a product's kernel; None for any other weight, also for an embedding's table
    # mesh axes whose ranks have the whole weight, and each a part of its gradient; None: those that cut the sequence
    partial: tuple[str, ...] | None = None

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


class Operation:
    """A step of a branch; says what one device reads, writes and saves for it."""

    def moved(self, arrays: DeviceArrays) -> int:
        """Elements that a forward pass reads and writes outside products with weights and outside attention's."""
        return 0

    def saved(self, arrays: DeviceArrays, before: "Operation") -> list[Saved]:
        """The activations that a forward pass saves; of attention, without those inside it.

        `before` is the operation before this one in its branch, a plain `Operation` for the first.
        """
        return []

    def masks(self, arrays: DeviceArrays) -> int:
        """Bytes of the masks that a forward pass saves, without those inside attention."""
        return 0

    def made_again(self, arrays: DeviceArrays, before: "Operation") -> int:
        """Bytes that a backward pass reads and writes to make an input, or masks, again (`pipeline.recompute`)."""
        return 0

    def remade(self, arrays: DeviceArrays) -> int:
        """Bytes that a backward pass makes of what is saved, and holds if no product fuses with elementwise work."""
        return 0

    def held(self, arrays: DeviceArrays) -> int:
        """Elements that a backward pass holds besides what is saved; of attention, without those inside it."""
        return 0

    def left(self, arrays: DeviceArrays) -> int:
        """Bytes that a backward pass in two parts saves from the first part, I, for the second, W."""
        return 0

    @property
    def inner(self) -> "tuple[InnerProduct, ...]":
        """The products without weights that the operation consists of; of attention, none."""
        return ()

    @property
    def products(self) -> "tuple[Product, ...]":
        """The products with weights that the operation consists of."""
        return ()

    @property
    def sums(self) -> tuple[float, float]:
        """How often F and I sum up the residual stream over tensor ranks; other exchanges count by their bytes."""
        number = sum(each.split == "inputs" for each in self.products)
        return number, number


@dataclasses.dataclass(frozen=True)
class Norm(Operation):
    """A norm; it saves its input, in the compute dtype, for the backward pass."""

    heads: int = 0  # 0: the norm of the residual stream; else of heads that tensor parallelism splits
    head_size: int = 0  # the width of a head
    replicas: int = 1  # the number of tensor ranks that compute the same head

    def moved(self, arrays: DeviceArrays) -> int:
        return 2 * self._elements(arrays)

    def saved(self, arrays: DeviceArrays, before: Operation) -> list[Saved]:
        return [Saved(self._elements(arrays), self.head_size or arrays.hidden, arrays.itemsize)]

    def _elements(self, arrays: DeviceArrays) -> int:
        return arrays.local(self.heads * self.head_size * self.replicas) or arrays.residual


@dataclasses.dataclass(frozen=True)
class Product(Operation):
    """The product of each position's vector and a kernel; it saves its input, in the dtype of products' operands."""

    inputs: int  # the length of the vectors
    outputs: int  # the number of the kernel's columns
    # what tensor parallelism shards: "outputs", "inputs", in a head "vocab" (over `pipe` × `tensor`); "": nothing
    split: str = ""
    positions: str = ""  # in a head: "scored" (`Task.num_scored`) or "first", of a sequence; in a layer "": every one
    shares_input: bool = False  # whether the product takes the same input as the product before it, which has saved it
    replicas: int = 1  # with the split "outputs": the number of tensor ranks that compute the same outputs
    # in a layer: the part of `pipeline.recompute` ("norms", "gelu") that makes the input again; "": it is always saved
    made_by: str = ""

    @property
    def products(self) -> "tuple[Product, ...]":
        return (self,)

    def kernel(self, tensor: int) -> tuple[int, int]:
        """Inputs and outputs of the kernel that one of `tensor` tensor ranks has."""
        inputs = self.inputs // tensor if self.split == "inputs" else self.inputs
        return inputs, self.outputs * self.replicas // tensor if self.split == "outputs" else self.outputs

    def saved_input(self, arrays: DeviceArrays) -> int:
        """Elements of the input as it is saved: gathered, except by products in pieces, which gather it again."""
        parts = 1 if self.split == "inputs" else arrays.parts
        return arrays.tokens * self.kernel(arrays.tensor)[0] // parts

    def saved(self, arrays: DeviceArrays, before: Operation) -> list[Saved]:
        elements = self.saved_input(arrays)
        if self.shares_input or self.made_by in arrays.recompute:
            return []
        if isinstance(before, Attention):
            return [arrays.of_heads(elements, self.inputs, before.head_size, of_product=True)]
        return [Saved(elements, self.kernel(arrays.tensor)[0], arrays.operand, of_product=True)]

    def made_again(self, arrays: DeviceArrays, before: Operation) -> int:
        return before.moved(arrays) * arrays.itemsize * (self.made_by in arrays.recompute)

    def left(self, arrays: DeviceArrays) -> int:
        """Bytes of the outputs' gradients, and of the inputs that the stash lacks.

        Products in pieces exchange in I all that they need: whole gradients of the outputs of row-parallel products,
        and the inputs of column-parallel ones from other ranks. A rank's own part of these is in the stash, unless the
        backward pass runs the whole layer again.
        """
        elements = arrays.tokens * self.kernel(arrays.tensor)[1]
        if self.split == "outputs" and arrays.parts > 1:
            others = arrays.parts - (FULL not in arrays.recompute)
            elements += arrays.tokens // arrays.parts * others * self.inputs * (not self.shares_input)
        elif FULL in arrays.recompute:
            elements += self.saved_input(arrays) * (not self.shares_input)
        return elements * arrays.operand


@dataclasses.dataclass(frozen=True)
class InnerProduct:
    """`number` products of a [rows, inputs] and a [inputs, outputs] matrix for each sequence, of activations."""

    rows: int
    inputs: int
    outputs: int
    number: int
    is_shared: bool = False  # whether tensor ranks share it equally

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.inputs * self.outputs * self.number


@dataclasses.dataclass(frozen=True)
class Attention(Operation):
    """Attention between the positions of a sequence; it saves queries, keys, values and probabilities.

    The flash kernel saves one sum for each row of probabilities instead. What the inside of attention
    takes is in `fiddlex.costs.attention_memory` and `fiddlex.costs.work`.
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

    def moved(self, arrays: DeviceArrays) -> int:
        """Elements of the biases or rotations of queries and keys."""
        return 2 * arrays.local(self.width + 2 * self.kv_width)

    def saved(self, arrays: DeviceArrays, before: Operation) -> list[Saved]:
        widths = self.width, self.kv_width, self.kv_width
        return [arrays.of_heads(arrays.local(width), width, self.head_size) for width in widths]

    def rows(self, arrays: DeviceArrays) -> int:
        """Rows of the scores on one device, B·N·S."""
        return arrays.tokens * self.heads // arrays.tensor

    def scores(self, arrays: DeviceArrays) -> int:
        """Scores on one device, B·N·S·S."""
        return self.rows(arrays) * arrays.seq_len


@dataclasses.dataclass(frozen=True)
class Activation(Operation):
    """An elementwise function between two products; it saves its inputs, in the compute dtype."""

    units: int  # the width of the function's output
    num_inputs: int = 1  # of width `units`: 1 for GELU, 2 where a gate multiplies a value

    def moved(self, arrays: DeviceArrays) -> int:
        return (self.num_inputs + 1) * arrays.local(self.units)

    def held(self, arrays: DeviceArrays) -> int:
        """The gradients of output and inputs."""
        return self.moved(arrays)

    def saved(self, arrays: DeviceArrays, before: Operation) -> list[Saved]:
        return self.num_inputs * [Saved(arrays.local(self.units), self.units // arrays.tensor, arrays.itemsize)]


@dataclasses.dataclass(frozen=True)
class Residual(Operation):
    """The end of a branch: adds the branch's output, after dropout, to the residual stream.

    Dropout saves its mask, a bit for each element in whole rows of `MASK_ROW` bytes.
    """

    def moved(self, arrays: DeviceArrays) -> int:
        return 3 * arrays.residual

    def masks(self, arrays: DeviceArrays) -> int:
        return arrays.mask(arrays.residual)

    def made_again(self, arrays: DeviceArrays, before: Operation) -> int:
        """Bytes of the random words of a mask, which are written and read once."""
        return 2 * WORD * arrays.residual * (arrays.dropout and "masks" in arrays.recompute)


NO_ATTENTION = Attention(heads=0, head_size=1, causal=True)  # of a layer without that operation


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
    scoring: tuple[Product | InnerProduct, ...]  # the matrix products of the head
    pads: bool = True  # whether rows pad a vocabulary that devices do not divide; otherwise each has it whole

    @property
    def parts(self) -> Parameters:
        """The parameters under the keys of the weights; `layers` has the parameters of one layer."""
        return {"embedding": self.embedding, "layers": self.layer, "head": self.head}

    def vocab_shards(self, devices: int) -> int:
        """In how many parts devices share the vocabulary: 1 where each has it whole, as some modules of Flax do."""
        sizes = [each.shape[each.axes.index("vocab")] for each in self.outer if "vocab" in each.axes]
        return devices if sizes and (self.pads or max(sizes) % devices == 0) else 1

    @property
    def outer(self) -> list[Parameter]:
        return [*leaves(self.embedding), *leaves(self.head)]

    @functools.cached_property
    def operations(self) -> list[Operation]:
        """The operations of a layer, all branches one after another."""
        return [operation for branch in self.branches for operation in branch]

    @functools.cached_property
    def attention(self) -> Attention:
        return next((each for each in self.operations if isinstance(each, Attention)), NO_ATTENTION)

    @functools.cached_property
    def reader(self) -> Operation | None:
        """The operation that saves a layer's input: the first norm, or in post-LN the first product; None: neither."""
        first = next((each for each in self.operations if isinstance(each, Product)), None)
        return self.operations[0] if first and first.made_by else first

    @functools.cached_property
    def sums(self) -> tuple[float, float]:
        """`Operation.sums` of a layer."""
        forward, backward = zip(*(each.sums for each in self.operations), strict=True)
        return sum(forward), sum(backward)

    @functools.cached_property
    def products(self) -> list[Product]:
        """The products of a layer, all branches one after another."""
        return [product for each in self.operations for product in each.products]
