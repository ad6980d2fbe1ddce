"""Dropout whose masks depend on the seed and on what is dropped, never on the layout.

Every mask element is addressed by (seed, step, example of the global batch, site, position or head, feature): `fold_in`
derives a key along that path, and jax's counter-based generator gives the element's bits. A device draws only the
elements that it holds, and any other sharding of the batch, the sequence or the heads draws the same elements. Elements
are drawn as float32, so that jax's default dtype (JAX_ENABLE_X64) does not change a mask.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

SITES_PER_LAYER = 3
EMBEDDING_SITE = 0
ATTENTION_SITE, ATTENTION_OUTPUT_SITE, MLP_OUTPUT_SITE = 1, 2, 3  # sites of layer 0; each layer adds SITES_PER_LAYER
# The most elements drawn at once. XLA:TPU counts the memory of all steps of the generator, some 240 bytes an element,
# before it fuses the steps; where that memory seems too much, XLA:TPU recomputes the steps, which prevents their
# fusion.
MOST_AT_ONCE = 2**23


@dataclasses.dataclass(frozen=True)
class Dropout:
    """The random stream of one microbatch.

    Attributes:
      rate: probability that dropout zeroes an element.
      keys_B: one key for each example, from `example_keys`.
      layer: number of the layer in the whole model, int32 scalar.
    """

    rate: float
    keys_B: jax.Array
    layer: jax.Array | int = 0

    def in_layer(self, layer: jax.Array) -> "Dropout":
        """The random stream of one layer."""
        return dataclasses.replace(self, layer=layer)

    def residual(self, x_BTH: jax.Array, site: int, *, sequence_parallel: bool) -> jax.Array:
        """Drops elements of activations; with sequence parallelism `x_BTH` is a tensor rank's part of the sequence."""
        length = x_BTH.shape[1]
        first = lax.axis_index("tensor") * length if sequence_parallel else 0
        return self._drop(x_BTH, site, first + jnp.arange(length))

    def attention(self, probabilities_BNQK: jax.Array) -> jax.Array:
        """Drops attention probabilities; `probabilities_BNQK` holds this tensor rank's heads."""
        num_heads = probabilities_BNQK.shape[1]
        return self._drop(
            probabilities_BNQK, ATTENTION_SITE, lax.axis_index("tensor") * num_heads + jnp.arange(num_heads)
        )

    def _drop(self, x: jax.Array, site: int, indices: jax.Array) -> jax.Array:
        number = site + SITES_PER_LAYER * self.layer if site else EMBEDDING_SITE
        keys_BI = jax.vmap(lambda key: jax.vmap(lambda i: _fold(key, number, i))(indices))(self.keys_B)
        shape = x.shape[2:]
        keep = lax.map(
            lambda key: jax.random.bernoulli(key, np.float32(1.0 - self.rate), shape),
            keys_BI.reshape(-1),
            batch_size=max(1, MOST_AT_ONCE // math.prod(shape)),
        )
        return jnp.where(keep.reshape(x.shape), x / (1.0 - self.rate), jnp.zeros((), x.dtype))


def example_keys(key: jax.Array, step: jax.Array | int, examples_B: jax.Array) -> jax.Array:
    """One key for each example of a microbatch.

    Args:
      key: the run's dropout key.
      step: int32 scalar, number of updates so far.
      examples_B: int32, each example's row in the global batch.
    """
    key = jax.random.fold_in(key, step)
    return jax.vmap(lambda example: jax.random.fold_in(key, example))(examples_B)


def _fold(key: jax.Array, *numbers: jax.Array | int) -> jax.Array:
    for number in numbers:
        key = jax.random.fold_in(key, number)
    return key
