"""What one device computes for one microbatch: matrix products, and the memory traffic beside them.

A fold over the operations of `fiddlex.models.spec`, on a device that holds 1/t of the layer's heads and hidden units.
Products have two operations for each multiply-add; the backward pass has one product for the gradient of the input (I)
and one for that of the weight (W) for each of the forward's (Narayanan et al., SC 2021, appendix). Traffic counts what
fused elementwise work reads and writes. Invariant: summed over the devices, the products of a step are
`fiddlex.costs.sizes.model_flops` but for those of labels, and with what is computed again `hardware_flops`.
"""

import dataclasses
from typing import NamedTuple

from fiddlex.cluster.topology import Chip
from fiddlex.config import Config
from fiddlex.costs.layer_memory import FLOAT32, ITEMSIZES, num_sequences
from fiddlex.models import spec
from fiddlex.models.registry import describe


class MatrixProduct(NamedTuple):
    """`number` products of a [rows, inputs] and a [inputs, outputs] matrix."""

    rows: int
    inputs: int
    outputs: int
    number: float = 1

    @property
    def flops(self) -> float:
        """Operations."""
        return 2 * self.rows * self.inputs * self.outputs * self.number

    @property
    def elements(self) -> float:
        """Numbers read and written."""
        return (self.rows * self.inputs + self.inputs * self.outputs + self.rows * self.outputs) * self.number

    @property
    def gradients(self) -> tuple["MatrixProduct", "MatrixProduct"]:
        """Those of the first factor and of the second."""
        rows, inputs, outputs, number = self
        return MatrixProduct(rows, outputs, inputs, number), MatrixProduct(inputs, rows, outputs, number)


@dataclasses.dataclass(frozen=True)
class Work:
    """Products in the compute dtype, and bytes that elementwise work reads and writes beside them."""

    products: tuple[MatrixProduct, ...] = ()
    traffic: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.products + other.products, self.traffic + other.traffic)

    @property
    def flops(self) -> float:
        """Operations of the products."""
        return sum(product.flops for product in self.products)

    def seconds(self, chip: Chip, dtype: str, efficiency: float) -> float:
        """Time on a chip: each product at a share of the peak, or as fast as memory feeds it; then the traffic.

        Williams et al., Roofline (CACM 2009), for each product by itself.

        Args:
          chip: the device.
          dtype: of the products.
          efficiency: share of the chip's peak that large products reach.

        Raises:
          ConfigError: when the chip has no peak for that dtype.
        """
        peak, itemsize = chip.peak(dtype) * efficiency, ITEMSIZES[dtype]
        products = (max(each.flops / peak, each.elements * itemsize / chip.memory_bandwidth) for each in self.products)
        return sum(products) + self.traffic / chip.memory_bandwidth


@dataclasses.dataclass(frozen=True)
class LayerWork:
    """One layer and microbatch.

    Attributes:
      forward: F.
      again: what `pipeline.recompute` computes again before the backward pass.
      backward_input: I.
      backward_weight: W.
    """

    forward: Work
    again: Work
    backward_input: Work
    backward_weight: Work


def layer_work(config: Config, *, flash: bool = False) -> LayerWork:
    """The work of a layer.

    Args:
      config: sizes.
      flash: attention in a fused kernel, which writes no scores, skips what a causal model masks, and computes the
        forward products of attention again in the backward pass (Dao et al., FlashAttention, NeurIPS 2022).
    """
    sizes = _Sizes.of(config)
    around, (scores, values) = sizes.products(), sizes.attention()
    inputs, weights = zip(*(product.gradients for product in around), strict=True)
    in_attention = (*scores.gradients, *values.gradients)
    streams = sizes.streams()
    if flash:
        seen = 2 if sizes.network.attention.causal else 1  # a causal kernel does half of the square
        inner, inner_backward = (
            tuple(product._replace(number=product.number / seen) for product in products)
            for products in ((scores, values), (scores, *in_attention))
        )
        softmax = softmax_backward = 0.0
    else:
        inner, inner_backward = (scores, values), in_attention
        softmax, softmax_backward = sizes.softmax(), 2 * sizes.softmax()
    forward = Work((*around, *inner), streams + softmax)
    again = {
        "none": Work(),
        "selective": Work() if flash else Work((scores,), softmax),
        "full": forward,
    }[config.pipeline.recompute]
    return LayerWork(
        forward,
        again,
        Work((*inputs, *inner_backward), 2 * streams + softmax_backward),
        Work(weights, sizes.accumulated()),
    )


class EdgeWork(NamedTuple):
    """What stands before the first stage and behind the last, for one microbatch and 1/shards of the vocabulary.

    Attributes:
      embed: looking up.
      head: the loss and its gradient.
      embed_backward: adding the gradient to the table.
    """

    embed: Work
    head: Work
    embed_backward: Work


def edge_work(config: Config, *, shards: int) -> EdgeWork:
    """The work of embedding and head; heads of labels, which read one position of each sequence, are left out.

    Args:
      config: sizes.
      shards: parts into which the vocabulary is cut.
    """
    sizes, itemsize = _Sizes.of(config), ITEMSIZES[config.model.dtype]
    scored = num_sequences(config) * sizes.network.task.num_scored
    columns = -(-config.model.vocab_size // shards)
    products = [
        MatrixProduct(scored, each.inputs, columns if each.split == "vocab" else each.outputs)
        for each in sizes.network.scoring
        if each.positions == "scored"
    ]
    gradients = (gradient for product in products for gradient in product.gradients)
    looked_up = sizes.tokens * config.model.hidden_size * (FLOAT32 + itemsize)
    softmax = 5 * scored * columns * FLOAT32  # logits to exponentials to gradients, read and written
    return EdgeWork(
        Work(traffic=2 * looked_up),
        Work((*products, *gradients), softmax),
        Work(traffic=2 * looked_up),
    )


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Elements of a microbatch's arrays on one device."""

    network: spec.Network
    num_sequences: int
    seq_len: int
    tensor: int
    itemsize: int
    dropout: bool
    split: int  # ranks over which norms and residuals are spread

    @classmethod
    def of(cls, config: Config) -> "_Sizes":
        model, tensor = config.model, config.mesh.tensor
        return cls(
            network=describe(config),
            num_sequences=num_sequences(config),
            seq_len=model.seq_len,
            tensor=tensor,
            itemsize=ITEMSIZES[model.dtype],
            dropout=model.dropout > 0,
            split=tensor if config.mesh.sequence_parallel else 1,
        )

    @property
    def tokens(self) -> int:
        return self.num_sequences * self.seq_len

    def products(self) -> tuple[MatrixProduct, ...]:
        """Those with weights, cut over tensor ranks as they say."""

        def local(width: int, product: spec.Product, side: str) -> int:
            return width // self.tensor if product.split == side else width

        products = (each for each in self.network.operations if isinstance(each, spec.Product))
        return tuple(
            MatrixProduct(self.tokens, local(each.inputs, each, "inputs"), local(each.outputs, each, "outputs"))
            for each in products
        )

    def attention(self) -> tuple[MatrixProduct, MatrixProduct]:
        """Scores, and values weighted by them."""
        attention, length = self.network.attention, self.seq_len
        heads = self.num_sequences * attention.heads // self.tensor
        return MatrixProduct(length, attention.head_size, length, heads), MatrixProduct(
            length, length, attention.head_size, heads
        )

    def softmax(self) -> float:
        """Bytes: float32 scores read, probabilities written; where some are dropped these read and written again."""
        scores = self.num_sequences * (self.network.attention.heads // self.tensor) * self.seq_len**2
        return scores * (FLOAT32 + self.itemsize + 2 * self.itemsize * self.dropout)

    def streams(self) -> float:
        """Bytes of norms, residual sums, activations, and biases of queries, keys and values, read and written once."""
        return sum(map(self._stream, self.network.operations)) * self.itemsize

    def _stream(self, operation: spec.Operation) -> float:
        """Elements that an operation reads and writes, besides what products do."""
        residual = self.tokens * self.network.hidden / self.split
        match operation:
            case spec.Norm():
                return 2 * residual
            case spec.Residual():
                return 3 * residual
            case spec.Activation():
                return (operation.num_inputs + 1) * self.tokens * (operation.units // self.tensor)
            case spec.Attention():
                return 2 * self.tokens * 3 * (operation.width // self.tensor)
        return 0.0

    def accumulated(self) -> float:
        """Bytes of the weights' gradients added to float32 sums."""
        weights = sum(product.inputs * product.outputs for product in self.products())
        return weights * (2 * FLOAT32 + self.itemsize)
