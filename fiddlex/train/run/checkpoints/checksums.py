"""The checksum of an array in a checkpoint: on devices when it is saved, and by numpy where there is no mesh.

It is the sum, modulo 2³², of the array's numbers as 32-bit words, each times an odd hash of its place. It depends on
the bits of the numbers and on their places, but not on the sharding or on zero padding: both zeros add nothing. Where
one number alone changes, the checksum changes, unless that number was zero and becomes the other zero. Where more
change, it changes with probability 1 − 2⁻³². Invariant: `checksum` and `checksum_of_stored` agree about equal arrays,
whatever computes them. So both work with bits: some devices take denormal numbers for zero.
"""

import json
import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fiddlex.parallel.host_memory import fetched

_FACTOR = 0x9E3779B1  # 2³² divided by the golden ratio, which is odd
_BLOCK = 2**20  # elements that `checksum_of_stored` takes at a time


def checksums(arrays: dict[str, jax.Array]) -> dict[str, int]:
    """The checksum of each array, one after another: XLA's CPU backend holds the sum's terms, as large as the array."""
    return {name: int(jax.device_get(checksum(x))) for name, x in arrays.items()}


@jax.jit
def checksum(x: jax.Array) -> jax.Array:
    """The checksum of an array, a scalar of type uint32; does not wait for it."""
    x, place = fetched(x), jnp.zeros(x.shape, jnp.uint32)
    for axis in range(x.ndim):
        place = (place + lax.broadcasted_iota(jnp.uint32, x.shape, axis)) * jnp.uint32(_FACTOR)
    return jnp.sum(_words(x) * (place | 1), dtype=jnp.uint32)  # odd, so that no bit of a word is lost


def _words(x: jax.Array) -> jax.Array:
    """The numbers as 32-bit words; those of two bytes as float32, so that a change of dtype changes no sum."""
    if x.dtype == jnp.bfloat16:
        words = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16
    else:
        words = lax.bitcast_convert_type(x.astype(jnp.float32) if x.dtype.itemsize < 4 else x, jnp.uint32)
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.where(words << 1 == 0, jnp.uint32(0), words)
    return words


def checksum_of_stored(x: np.ndarray) -> int:
    """The checksum of an array in this process's memory; needs a few MB besides the array."""
    columns = x.shape[-1] if x.ndim else 1
    rows = x.reshape(math.prod(x.shape[:-1]), columns)
    starts: np.ndarray = np.zeros(x.shape[:-1], np.uint32)
    for axis, size in enumerate(x.shape[:-1]):
        along = np.arange(size, dtype=np.uint32).reshape(-1, *[1] * (x.ndim - 2 - axis))
        starts = (starts + along) * np.uint32(_FACTOR)
    starts = starts.reshape(-1)
    total = 0
    height = max(1, _BLOCK // max(columns, 1))
    for row in range(0, len(rows), height):
        for column in range(0, columns, _BLOCK):
            block = rows[row : row + height, column : column + _BLOCK]
            places = starts[row : row + height, None] + np.arange(column, column + block.shape[1], dtype=np.uint32)
            if x.ndim:  # a scalar has no axis
                places *= np.uint32(_FACTOR)
            total += int(np.sum(_stored_words(block) * (places | np.uint32(1)), dtype=np.uint32))
    return total % 2**32


def other_checksum(x: np.ndarray, saved: int) -> str:
    """What is wrong with an array in this process's memory whose checksum was `saved`; empty when nothing is."""
    found = checksum_of_stored(x)
    return "" if found == saved else f"its checksum is {found}, and {saved} was saved"


def _stored_words(x: np.ndarray) -> np.ndarray:
    if x.dtype == jnp.bfloat16:
        words = x.view(np.uint16).astype(np.uint32) << np.uint32(16)
    else:
        words = np.ascontiguousarray(x.astype(np.float32) if x.dtype.itemsize < 4 else x).view(np.uint32)
    if jnp.issubdtype(x.dtype, jnp.floating):
        return np.where(words << np.uint32(1) == 0, np.uint32(0), words)
    return words


def text_checksum(meta: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(meta, sort_keys=True).encode())
