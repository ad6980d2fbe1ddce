"""What one device computes for one microbatch: matrix products, and the memory traffic beside them.

Follows the program as written (`fiddlex.models.layers`, `operators`, `vocabulary`), on a device that holds 1/t of the
layer's heads and hidden units. Letters as in `fiddlex.simulate.memory`: B examples, S positions, H hidden, A = H/t this
rank's part of the heads' joint width, F of the MLP; T = B·S tokens. Products have two operations for each multiply-add;
the backward pass has one product for the gradient of the input (I) and one for that of the weight (W) for each of the
forward's (Narayanan et al., SC 2021, appendix). Traffic counts what fused elementwise work reads and writes. Invariant:
summed over the devices, the products of a step are `fiddlex.sizes.model_flops`, and with what is computed again
`hardware_flops`. Imports no jax.
"""

import dataclasses
from typing import NamedTuple

from fiddlex.config import Config
from fiddlex.simulate.layer_memory import FLOAT32, ITEMSIZES, num_masked, num_rows
from fiddlex.topology import Chip


class Product(NamedTuple):
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
    def gradients(self) -> tuple["Product", "Product"]:
        """Those of the first factor and of the second."""
        rows, inputs, outputs, number = self
        return Product(rows, outputs, inputs, number), Product(inputs, rows, outputs, number)


@dataclasses.dataclass(frozen=True)
class Work:
    """Products in the compute dtype, and bytes that elementwise work reads and writes beside them."""

    products: tuple[Product, ...] = ()
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
    around, scores, values = sizes.around(), *sizes.attention()
    inputs, weights = zip(*(product.gradients for product in around), strict=True)
    in_attention = (*scores.gradients, *values.gradients)
    streams = sizes.streams()
    if flash:
        seen = 2 if config.model.family == "gpt" else 1  # a causal kernel does half of the square
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
    """The work of embedding and head; BERT's heads of labels, a few rows of each example, are left out.

    Args:
      config: sizes.
      shards: parts into which the vocabulary is cut.
    """
    sizes, itemsize = _Sizes.of(config), ITEMSIZES[config.model.dtype]
    columns = -(-config.model.vocab_size // shards)
    products = [Product(sizes.scored, config.model.hidden_size, columns)]
    if config.model.family == "bert":  # the transform, which every device does whole
        products.append(Product(sizes.scored, config.model.hidden_size, config.model.hidden_size))
    gradients = (gradient for product in products for gradient in product.gradients)
    looked_up = sizes.tokens * config.model.hidden_size * (FLOAT32 + itemsize)
    softmax = 5 * sizes.scored * columns * FLOAT32  # logits to exponentials to gradients, read and written
    return EdgeWork(
        Work(traffic=2 * looked_up),
        Work((*products, *gradients), softmax),
        Work(traffic=2 * looked_up),
    )


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Elements of a microbatch's arrays on one device."""

    examples: int  # sequences, of which an example of multiple choice has several
    positions: int
    hidden: int
    width: int  # of this rank's heads together
    heads: int
    head_size: int
    units: int
    scored: int
    itemsize: int
    dropout: bool
    split: int  # ranks over which norms and residuals are spread

    @classmethod
    def of(cls, config: Config) -> "_Sizes":
        model, tensor = config.model, config.mesh.tensor
        examples = num_rows(config)
        return cls(
            examples=examples,
            positions=model.seq_len,
            hidden=model.hidden_size,
            width=model.hidden_size // tensor,
            heads=model.num_heads // tensor,
            head_size=model.head_size,
            units=model.mlp_size // tensor,
            scored=examples * _scored(config),
            itemsize=ITEMSIZES[model.dtype],
            dropout=model.dropout > 0,
            split=tensor if config.mesh.sequence_parallel else 1,
        )

    @property
    def tokens(self) -> int:
        return self.examples * self.positions

    def around(self) -> tuple[Product, ...]:
        """Products with weights: queries, keys and values; what attention gives; the MLP's two."""
        return (
            Product(self.tokens, self.hidden, 3 * self.width),
            Product(self.tokens, self.width, self.hidden),
            Product(self.tokens, self.hidden, self.units),
            Product(self.tokens, self.units, self.hidden),
        )

    def attention(self) -> tuple[Product, Product]:
        """Scores, and values weighted by them."""
        heads, length = self.examples * self.heads, self.positions
        return Product(length, self.head_size, length, heads), Product(length, length, self.head_size, heads)

    def softmax(self) -> float:
        """Bytes: float32 scores read, probabilities written; where some are dropped these read and written again."""
        scores = self.examples * self.heads * self.positions**2
        return scores * (FLOAT32 + self.itemsize + 2 * self.itemsize * self.dropout)

    def streams(self) -> float:
        """Bytes of two norms, two residual sums, GELU and the biases, each read and written once."""
        residual = self.tokens * self.hidden / self.split
        return (2 * 2 * residual + 2 * 3 * residual + 2 * self.tokens * (self.units + 3 * self.width)) * self.itemsize

    def accumulated(self) -> float:
        """Bytes of the weights' gradients added to float32 sums."""
        weights = sum(product.inputs * product.outputs for product in self.around())
        return weights * (2 * FLOAT32 + self.itemsize)


def _scored(config: Config) -> int:
    """Positions of an example that are scored against the vocabulary: all of lm, the masked ones of mlm, else none."""
    return config.model.seq_len if config.model.task == "lm" else num_masked(config)
