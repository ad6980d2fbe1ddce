"""Dropout whose masks depend on the seed and on what is dropped, never on the layout.

Every mask element is addressed by (seed, step, example of the global batch, site, position or head, feature): `fold_in`
derives a key along that path, and jax's counter-based generator gives the element's bits. A device draws only the
elements that it holds, and any other sharding of the batch, the sequence or the heads draws the same elements. Elements
are drawn as float32, so that jax's default dtype (JAX_ENABLE_X64) does not change a mask.

The backward pass reads a mask from the bits that the forward pass saved, eight elements in a byte, or draws it again.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fiddlex.models.device_arrays import MASK_ROW
from fiddlex.parallel.collectives import first_position

SITES_PER_LAYER = 3
EMBEDDING_SITE = 0
ATTENTION_SITE, ATTENTION_OUTPUT_SITE, MLP_OUTPUT_SITE = 1, 2, 3  # sites of layer 0; each layer adds SITES_PER_LAYER
_PLACES = np.arange(8, dtype=np.uint8)[:, None, None]  # of the bits of a byte
# The most elements drawn at once. XLA:TPU counts the memory of all steps of the generator, some 240 bytes an element,
# before it fuses the steps; where that memory seems too much, XLA:TPU recomputes the steps, which prevents their
# fusion.
MOST_AT_ONCE = 2**23


@dataclasses.dataclass(frozen=True)
class Dropout:
    """The random stream of one microbatch."""

    rate: float  # probability that dropout zeroes an element
    keys_B: jax.Array  # one key for each example, from `example_keys`
    layer: jax.Array | int = 0  # number of the layer in the whole model, int32 scalar
    redraws: bool = False  # whether the backward pass draws masks again instead of reading saved ones

    def in_layer(self, layer: jax.Array) -> "Dropout":
        return dataclasses.replace(self, layer=layer)

    def residual(self, x_BTH: jax.Array, site: int, axes: tuple[str, ...]) -> jax.Array:
        """Drops elements of activations, of the part of the sequence that a rank of these mesh axes has."""
        length = x_BTH.shape[1]
        first = first_position(length, axes)
        return self._drop(x_BTH, site, first + jnp.arange(length))

    def attention(self, probabilities_BNQK: jax.Array) -> jax.Array:
        """Drops attention probabilities; `probabilities_BNQK` holds this tensor rank's heads."""
        num_heads = probabilities_BNQK.shape[1]
        return self._drop(
            probabilities_BNQK, ATTENTION_SITE, lax.axis_index("tensor") * num_heads + jnp.arange(num_heads)
        )

    def _drop(self, x: jax.Array, site: int, indices: jax.Array) -> jax.Array:
        number = site + SITES_PER_LAYER * self.layer if site else EMBEDDING_SITE
        source = self.keys_B, jnp.asarray(number), indices
        if self.redraws:
            return _masked(x, source, functools.partial(_drawn, rate=self.rate, shape=x.shape), self.rate)
        bits = _packed(_drawn(source, rate=self.rate, shape=x.shape))
        return _masked(x, bits, functools.partial(_unpacked, shape=x.shape), self.rate)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _masked(x: jax.Array, source: Any, mask: Callable[[Any], jax.Array], rate: float) -> jax.Array:
    """Dropout of `x` with the mask `mask(source)`; the backward pass makes the mask from `source` again."""
    return jnp.where(mask(source), x / (1.0 - rate), jnp.zeros((), x.dtype))


def _masked_forward(x: jax.Array, source: Any, mask: Callable[[Any], jax.Array], rate: float) -> tuple[jax.Array, Any]:
    return _masked(x, source, mask, rate), source


def _masked_backward(
    mask: Callable[[Any], jax.Array], rate: float, source: Any, g: jax.Array
) -> tuple[jax.Array, None]:
    return _masked(g, source, mask, rate), None


_masked.defvjp(_masked_forward, _masked_backward)


def _drawn(source: tuple[jax.Array, jax.Array, jax.Array], *, rate: float, shape: tuple[int, ...]) -> jax.Array:
    """The mask of a site, bool of `shape`, from the keys of the examples, the site's number and the indices."""
    keys_B, number, indices = source
    keys_BI = jax.vmap(lambda key: jax.vmap(lambda i: _fold(key, number, i))(indices))(keys_B)
    keep = lax.map(
        lambda key: jax.random.bernoulli(key, np.float32(1.0 - rate), shape[2:]),
        keys_BI.reshape(-1),
        batch_size=max(1, MOST_AT_ONCE // math.prod(shape[2:])),
    )
    return keep.reshape(shape)


def _packed(mask: jax.Array) -> jax.Array:
    """The elements of a mask as bits, uint8 [rows, MASK_ROW], padded with 0; a row is as wide as the lanes of a TPU."""
    # The elements of a byte lie equally far from each other in the mask, so that to pack them moves none of them.
    padded = jnp.pad(mask.reshape(-1), (0, -mask.size % (8 * MASK_ROW)))
    return (padded.reshape(8, -1, MASK_ROW).astype(jnp.uint8) << _PLACES).sum(axis=0, dtype=jnp.uint8)


def _unpacked(bits: jax.Array, *, shape: tuple[int, ...]) -> jax.Array:
    return ((bits >> _PLACES) & 1).astype(bool).reshape(-1)[: math.prod(shape)].reshape(shape)


def example_keys(key: jax.Array, step: jax.Array | int, examples_B: jax.Array) -> jax.Array:
    """One key for each example of a microbatch: int32 rows of the global batch, `examples_B`, after `step` steps."""
    key = jax.random.fold_in(key, step)
    return jax.vmap(lambda example: jax.random.fold_in(key, example))(examples_B)


def _fold(key: jax.Array, *numbers: jax.Array | int) -> jax.Array:
    for number in numbers:
        key = jax.random.fold_in(key, number)
    return key
