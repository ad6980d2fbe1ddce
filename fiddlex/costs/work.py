"""The work of one device for one microbatch: matrix products, and the memory traffic of the other operations.

The functions sum over the operations of `fiddlex.models.spec`, on a device that holds 1/t of the layer's heads and
hidden units. For each product of the forward pass the backward pass has one for the gradient of the input (I) and one
for the gradient of the weight (W) (Narayanan et al., SC 2021, appendix). With `mesh.collective_matmul` the products of
F and I with weights run in pieces, each of which reads the whole kernel; W has one product for each kernel. Traffic is
the bytes that fused elementwise work reads and writes. An encoded stash (`pipeline.stash_dtype`) adds that of encoding
to F, and that of decoding to I and to W, which decodes the inputs of products. Invariant: summed over the devices, the
operations of a step's products are `fiddlex.costs.sizes.model_flops`, except for the label heads; with the recomputed
products, they are `hardware_flops`.
"""

import dataclasses
import itertools
import math
from typing import NamedTuple

from fiddlex.config import Config
from fiddlex.config.values.recompute import FULL
from fiddlex.costs.backend import CPU
from fiddlex.costs.layer_memory import LayerMemory
from fiddlex.hardware.chips import Chip
from fiddlex.hardware.pieces import num_pieces
from fiddlex.models import spec
from fiddlex.models.device_arrays import FLOAT32, ITEMSIZES, WORD, DeviceArrays, num_scored
from fiddlex.models.registry import network_of


class MatrixProduct(NamedTuple):
    """`number` products of a [rows, inputs] and a [inputs, outputs] matrix."""

    rows: int
    inputs: int
    outputs: int
    number: float = 1

    @property
    def flops(self) -> float:
        """Number of operations, two for each multiply-add."""
        return 2 * self.rows * self.inputs * self.outputs * self.number

    @property
    def elements(self) -> float:
        """Number of elements read and written."""
        return (self.rows * self.inputs + self.inputs * self.outputs + self.rows * self.outputs) * self.number

    @property
    def gradients(self) -> tuple["MatrixProduct", "MatrixProduct"]:
        """The products for the gradients of the first factor and of the second."""
        rows, inputs, outputs, number = self
        return MatrixProduct(rows, outputs, inputs, number), MatrixProduct(inputs, rows, outputs, number)


@dataclasses.dataclass(frozen=True)
class Work:
    """Products in the compute dtype, and the bytes that elementwise work reads and writes in addition to them."""

    products: tuple[MatrixProduct, ...] = ()
    traffic: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.products + other.products, self.traffic + other.traffic)

    @property
    def flops(self) -> float:
        return sum(product.flops for product in self.products)

    def seconds(self, chip: Chip, dtype: str, efficiency: float) -> float:
        """Seconds on a chip: those of each product, plus those of the memory traffic.

        A product takes the longer of two times: its operations at the share `efficiency` of the peak, and its elements
        at the memory's bandwidth. This is the roofline model (Williams et al., CACM 2009) for each product by itself.
        """
        peak, itemsize = chip.peak(dtype) * efficiency, ITEMSIZES[dtype]
        products = (max(each.flops / peak, each.elements * itemsize / chip.memory_bandwidth) for each in self.products)
        return sum(products) + self.traffic / chip.memory_bandwidth


@dataclasses.dataclass(frozen=True)
class LayerWork:
    """The work of one layer for one microbatch."""

    forward: Work  # F
    again: Work  # what `pipeline.recompute` repeats before the backward pass
    backward_input: Work  # I
    backward_weight: Work  # W


NEWTON_SCHULZ_ITERATIONS = 5  # of Muon (`fiddlex.train.step.muon`)


def update_work(config: Config) -> Work:
    """The products of an optimizer's update on the device that has most of them; only Muon's has any.

    Each iteration on an r × c matrix X, r ≤ c, computes A = X Xᵀ, A A and a product of an r × r matrix with X. A pipe
    rank deals its matrices out to its devices; each has whole ones.
    """
    if config.optimizer.name != "muon":
        return Work()
    network, mesh = network_of(config), config.mesh
    layers, devices = -(-network.num_layers // mesh.pipe), mesh.tensor * (mesh.data if config.optimizer.zero1 else 1)
    products: list[MatrixProduct] = []
    for parameter in spec.leaves(network.layer):
        if parameter.matrix is None:
            continue
        sizes = (
            math.prod(parameter.shape[i] for i in axes) for axes in (parameter.matrix.inputs, parameter.matrix.outputs)
        )
        small, large = sorted(sizes)
        number = NEWTON_SCHULZ_ITERATIONS * -(-layers * (parameter.size // (small * large)) // devices)
        products += [
            MatrixProduct(small, large, small, number),
            MatrixProduct(small, small, small, number),
            MatrixProduct(small, small, large, number),
        ]
    return Work(tuple(products))


def layer_work(config: Config, *, flash: bool = False, in_blocks: bool = False) -> LayerWork:
    """The work of one layer for one microbatch.

    With `flash`, attention runs in a fused kernel, which writes no scores, skips the scores that a causal model masks,
    and recomputes the scores in the backward pass (Dao et al., FlashAttention, NeurIPS 2022). With `in_blocks`,
    `mesh.collective_matmul` cuts products into blocks; otherwise they run in rings (`fiddlex.hardware.pieces`).
    """
    sizes = _Sizes.of(config, in_blocks=in_blocks)
    around, (scores, values) = tuple(map(sizes.in_pieces, sizes.products())), sizes.attention()
    inputs = tuple(product.gradients[0] for product in around)
    weights = tuple(product.gradients[1] for product in sizes.products())
    of_layer = sizes.inner()
    in_attention = (*scores.gradients, *values.gradients, *(each for one in of_layer for each in one.gradients))
    streams = sizes.streams()
    if flash:
        seen = 2 if sizes.network.attention.causal else 1  # a causal kernel computes half of the S × S square
        inner, inner_backward = (
            tuple(product._replace(number=product.number / seen) for product in products)
            for products in ((scores, values), (scores, *in_attention))
        )
        softmax = softmax_backward = 0.0
    else:
        inner, inner_backward = (scores, values), in_attention
        softmax, softmax_backward = sizes.softmax(), 2 * sizes.softmax()
    copies = sizes.copied()
    of_products, of_others = _encoded(config, flash=flash)
    forward = Work((*around, *of_layer, *inner), streams + softmax + copies + of_products + of_others)
    return LayerWork(
        forward,
        _again(sizes, forward, Work() if flash else Work((scores,), softmax)),
        Work((*inputs, *inner_backward), 2 * streams + softmax_backward + copies + of_others),
        Work(weights, sizes.accumulated() + of_products),
    )


def _encoded(config: Config, *, flash: bool) -> tuple[float, float]:
    """Bytes that encoding reads and writes, as many as decoding does: of products' inputs, and of other activations."""
    of_products, of_others = LayerMemory.of(config, CPU, kernel="any" if flash else "").encoded()
    moved = ITEMSIZES[config.model.dtype] + 1
    return moved * of_products, moved * of_others


def _again(sizes: "_Sizes", forward: Work, probabilities: Work) -> Work:
    """The work that a backward pass repeats; `probabilities` is the work of those of attention outside a kernel."""
    recomputed = sizes.arrays.recompute
    if FULL in recomputed:
        return forward
    again = Work(traffic=sizes.made_again())
    if "attention" in recomputed:
        again += probabilities
    draws = sizes.arrays.dropout and bool(probabilities.products) and recomputed & {"attention", "masks"}
    return again + Work(traffic=2 * WORD * sizes.scores if draws else 0.0)


class ExchangedWork(NamedTuple):
    """The products beside which one exchange runs (`fiddlex.models.collective_matmul`), for one microbatch."""

    gathers: bool  # F gathers the products' input, and I sums its gradients; else F sums results, I gathers gradients
    forward: Work  # products of F, in pieces
    backward_input: Work  # products of I


def exchanged_work(config: Config, *, in_blocks: bool) -> tuple[ExchangedWork, ...]:
    """The products of a layer by the exchanges beside which they run; products that share their input share one.

    A product that is not split over tensor ranks has none.
    """
    sizes = _Sizes.of(config, in_blocks=in_blocks)
    groups: list[tuple[spec.Product, list[MatrixProduct]]] = []
    for operation, product in zip(sizes.network.products, map(sizes.in_pieces, sizes.products()), strict=True):
        if operation.shares_input:
            groups[-1][1].append(product)
        else:
            groups.append((operation, [product]))
    return tuple(
        ExchangedWork(first.split == "outputs", Work(tuple(group)), Work(tuple(each.gradients[0] for each in group)))
        for first, group in groups
        if first.split
    )


class EdgeWork(NamedTuple):
    """The work before the first stage and after the last, for one microbatch and 1/shards of the vocabulary."""

    embed: Work  # the lookup in the embedding table
    head: Work  # the loss and its gradient
    embed_backward: Work  # the addition of the gradient to the embedding table


def edge_work(config: Config, *, shards: int) -> EdgeWork:
    """The work of embedding and head, without label heads, which read one position of each sequence."""
    sizes, itemsize = _Sizes.of(config), ITEMSIZES[config.model.dtype]
    scored = num_scored(config)
    columns = -(-config.model.vocab_size // sizes.network.vocab_shards(shards))
    products = [
        MatrixProduct(scored, each.inputs, columns if each.split == "vocab" else each.outputs)
        for each in sizes.network.scoring
        if isinstance(each, spec.Product) and each.positions == "scored"
    ] + [sizes.of_sequences(each) for each in sizes.network.scoring if isinstance(each, spec.InnerProduct)]
    gradients = (gradient for product in products for gradient in product.gradients)
    looked_up = sizes.arrays.tokens * config.model.hidden_size * (FLOAT32 + itemsize)
    softmax = 5 * scored * columns * FLOAT32  # logits to exponentials to gradients, read and written
    return EdgeWork(
        Work(traffic=2 * looked_up),
        Work((*products, *gradients), softmax),
        Work(traffic=2 * looked_up),
    )


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Sizes of a microbatch's arrays on one device, and the work that reads and writes them."""

    network: spec.Network
    arrays: DeviceArrays
    pieces: int  # number of pieces in which a product with weights runs
    copies: bool  # whether the pieces of the whole sequence are copied out of it or into it

    @classmethod
    def of(cls, config: Config, *, in_blocks: bool = False) -> "_Sizes":
        network, matmul = network_of(config), config.mesh.collective_matmul
        arrays = DeviceArrays.of(config, network.hidden)
        length = arrays.seq_len // arrays.tensor
        pieces = num_pieces(arrays.num_sequences, length, arrays.tensor, in_blocks=in_blocks) if matmul else 1
        return cls(network, arrays, pieces, copies=in_blocks and pieces > 1)

    def products(self) -> tuple[MatrixProduct, ...]:
        """The products with weights, split over tensor ranks as each `Product.split` says."""
        arrays = self.arrays
        return tuple(MatrixProduct(arrays.tokens, *each.kernel(arrays.tensor)) for each in self.network.products)

    def inner(self) -> tuple[MatrixProduct, ...]:
        """The products without weights, but for those of attention."""
        return tuple(self.of_sequences(each) for operation in self.network.operations for each in operation.inner)

    def of_sequences(self, product: spec.InnerProduct) -> MatrixProduct:
        number = product.number * self.arrays.num_sequences / (self.arrays.tensor if product.is_shared else 1)
        return MatrixProduct(product.rows, product.inputs, product.outputs, number)

    def in_pieces(self, product: MatrixProduct) -> MatrixProduct:
        """A product of F as it runs beside its exchange: once for each piece of the sequence."""
        return product._replace(rows=product.rows // self.pieces, number=self.pieces)

    def copied(self) -> float:
        """Bytes that F, or I, reads and writes to copy pieces into arrays of the whole sequence, or out of them."""
        if not self.copies:
            return 0.0
        widths = (each.kernel(self.arrays.tensor)[each.split == "outputs"] for each in self.network.products)
        return 2 * self.arrays.tokens * sum(widths) * self.arrays.itemsize

    def attention(self) -> tuple[MatrixProduct, MatrixProduct]:
        """The two products of attention: the scores, and the values weighted by the probabilities."""
        length, size = self.arrays.seq_len, self.network.attention.head_size
        heads = self.network.attention.rows(self.arrays) // length
        return MatrixProduct(length, size, length, heads), MatrixProduct(length, length, size, heads)

    def softmax(self) -> float:
        """Bytes of a softmax: reads float32 scores, writes probabilities; dropout reads and writes these once more."""
        return self.scores * (FLOAT32 + self.arrays.itemsize + 2 * self.arrays.itemsize * self.arrays.dropout)

    @property
    def scores(self) -> int:
        return self.network.attention.scores(self.arrays)

    def made_again(self) -> float:
        """Bytes that a backward pass reads and writes to make inputs of products, and masks of the stream, again."""
        pairs = itertools.pairwise((spec.Operation(), *self.network.operations))
        return sum(operation.made_again(self.arrays, before) for before, operation in pairs)

    def streams(self) -> float:
        """Bytes that norms, sums, activations, and biases or rotations of queries and keys read and write once."""
        return sum(each.moved(self.arrays) for each in self.network.operations) * self.arrays.itemsize

    def accumulated(self) -> float:
        """Bytes that the addition of the weights' gradients to float32 sums reads and writes."""
        weights = sum(product.inputs * product.outputs for product in self.products())
        return weights * (2 * FLOAT32 + self.arrays.itemsize)
