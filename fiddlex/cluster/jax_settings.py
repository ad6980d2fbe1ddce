"""jax's settings (`JAX_…`, `jax.config`) that change numbers: fiddlex fixes some for its own programs and keeps others.

Invariant: the random numbers of a run, the dtypes of its arrays and what its programs may combine follow from its
config alone, whatever the settings of the process. Only `KEPT` settings are the user's: the processes of a run must
agree on them, and a checkpoint says which it was made with.
"""

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp

KEPT = ("jax_default_matmul_precision", "jax_high_dynamic_range_gumbel")  # of products, and of draws of tokens


@contextlib.contextmanager
def fixed_settings() -> Iterator[None]:
    """A context, or a decorator, in which jax traces programs in 32 bits and with its defaults."""
    with (
        jax.enable_x64(False),
        # Without `threefry_partitionable` jax draws other numbers. With other values of the next four jax refuses
        # what fiddlex writes, or changes the gradient of softmax.
        jax.threefry_partitionable(True),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        jax.debug_key_reuse(False),
        jax.softmax_custom_jvp(False),
    ):
        yield


def key_of(seed: int | jax.Array) -> jax.Array:
    """The random key of a seed from 0 to 2^31 − 1, as `jax.random.key` makes it by default."""
    # `jax.random.key` adds JAX_RANDOM_SEED_OFFSET to the seed and takes the generator of JAX_DEFAULT_PRNG_IMPL:
    # `rbg` draws other numbers on other layouts.
    return jax.random.wrap_key_data(jnp.asarray([0, seed], jnp.uint32), impl="threefry2x32")


def kept_settings() -> dict[str, str]:
    return {name: str(getattr(jax.config, name, None)) for name in KEPT}  # not every version of jax has each
