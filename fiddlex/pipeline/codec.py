"""Encodes activations in 8 bits for the stash (`fiddlex.config.values.stash`), and decodes them for the backward pass.

An encoded array is a pair: elements of 8 bits, in the shape of the array, and one float32 scale for each row along the
last dimension. A value is its element times the scale of its row; the largest magnitude of a row becomes the largest
element. Zeros stay zeros. A value that is not finite makes its whole row infinite or NaN.

Most activations need no scale in float8_e4m3fn, but it has no numbers between 0 and 2⁻⁹, where the probabilities of
long sequences are, and none above 448. Whole rows, not shorter blocks, have a scale, since XLA:TPU then encodes and
decodes in the loops that make or use the array. For blocks of 128 elements it writes float32 arrays in the shape of the
activations (docs/memory.md has both measurements).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fiddlex.config.values.stash import SAME, SCALE_ROW

Arrays = list[jax.Array]
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}


class Codec(NamedTuple):
    """Encodes arrays of floating-point numbers, [..., width]."""

    dtype: str  # the type of the elements, one of `LARGEST`

    def encode(self, x: jax.Array) -> Arrays:
        """The elements, in the shape of `x`, and the scales, float32 [rows of scales, SCALE_ROW]."""
        scales = jnp.abs(x).max(axis=-1, keepdims=True).astype(jnp.float32) / LARGEST[self.dtype]
        # Rows of zeros, or of values below 1e-35, become zeros. The elements of a row whose scale is NaN do not matter.
        factors = jnp.where(scales > jnp.finfo(jnp.float32).tiny, 1 / scales, 0)
        elements = x.astype(jnp.float32) * factors
        if jnp.issubdtype(self.dtype, jnp.integer):
            elements = jnp.round(elements)
        rest = -scales.size % SCALE_ROW
        return [elements.astype(self.dtype), jnp.pad(scales.reshape(-1), (0, rest)).reshape(-1, SCALE_ROW)]

    def decode(self, encoded: Arrays, dtype: jnp.dtype) -> jax.Array:
        """The array of `dtype` that `encode` encoded, but for rounding."""
        elements, scales = encoded
        sizes = elements.shape[:-1]
        scales = scales.reshape(-1)[: elements.size // elements.shape[-1]].reshape(*sizes, 1)
        return (elements.astype(jnp.float32) * scales).astype(dtype)


def codec_of(stash_dtype: str) -> Codec | None:
    """The codec of a value of `pipeline.stash_dtype`; None: the stash holds every array as it is."""
    return None if stash_dtype == SAME else Codec(stash_dtype)
