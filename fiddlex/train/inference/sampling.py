"""Draws tokens from logits: temperature, top-k and top-p (nucleus, Holtzman et al., ICLR 2020)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from fiddlex.cluster.jax_settings import fixed_settings, key_of
from fiddlex.config.rules import INTEGER_LIMIT
from fiddlex.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How the next token is drawn."""

    temperature: float = 1.0  # divides the logits; 0 always takes the likeliest token
    top_k: int = 0  # only the k likeliest tokens may be drawn; 0 allows all tokens
    # only the likeliest tokens that together reach this probability may be drawn, at least one; 1 allows all tokens
    top_p: float = 1.0
    seed: int = 0  # random seed of the draws, at least 0

    def validate(self) -> None:
        """Raises ConfigError when a value is out of its range."""
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature={self.temperature} must be at least 0 and finite.")
        if not 0 <= self.top_k < INTEGER_LIMIT:
            raise ConfigError(f"top_k={self.top_k} must be at least 0 and below {INTEGER_LIMIT}; 0 allows every token.")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p} must be above 0 and at most 1; 1 allows every token.")
        if not 0 <= self.seed < INTEGER_LIMIT:
            raise ConfigError(f"seed={self.seed} must be at least 0 and below {INTEGER_LIMIT}.")


@fixed_settings()
def sample(
    logits_BV: jax.Array, number: int, config: SamplingConfig, *, vocab_size: int, first_row: int = 0
) -> jax.Array:
    """Draws one token for each row, int32 [B]: applies temperature, then top-k, then top-p (see `SamplingConfig`).

    A row's draw depends on its float32 logits, its number, counted from `first_row`, the seed and `number`, which
    counts the draws of a text from 0; it does not depend on the other rows. Only tokens below `vocab_size` are drawn.
    Where logits are not finite, the token is -1.
    """
    if config.temperature == 0 or config.top_k == 1:
        return _likeliest(logits_BV, vocab_size=vocab_size)
    scale = min(1 / config.temperature, float(jnp.finfo(jnp.float32).max))
    cuts = config.top_k > 0 or config.top_p < 1
    numbers = (config.seed, number, first_row, scale, config.top_k, config.top_p)
    return _draw(logits_BV, *numbers, vocab_size=vocab_size, cuts=cuts)


@functools.partial(jax.jit, static_argnames="vocab_size")
def _likeliest(logits_BV: jax.Array, *, vocab_size: int) -> jax.Array:
    return _checked(jnp.argmax(logits_BV[:, :vocab_size], axis=-1), logits_BV)


@functools.partial(jax.jit, static_argnames=("vocab_size", "cuts"))
def _draw(
    logits_BV: jax.Array,
    seed: int,
    number: int,
    first_row: int,
    scale: float,
    top_k: int,
    top_p: float,
    *,
    vocab_size: int,
    cuts: bool,
) -> jax.Array:
    logits_BV = logits_BV[:, :vocab_size]
    # The lowest float in place of -inf, which a very low temperature would make.
    scaled_BV = jnp.maximum((logits_BV - logits_BV.max(axis=-1, keepdims=True)) * scale, jnp.finfo(jnp.float32).min)
    if cuts:
        scaled_BV = jnp.where(_allowed(scaled_BV, top_k, top_p), scaled_BV, -jnp.inf)
    key = jax.random.fold_in(key_of(seed), number)
    keys_B = jax.vmap(lambda row: jax.random.fold_in(key, row))(first_row + jnp.arange(len(logits_BV)))
    chosen_B = jax.vmap(jax.random.categorical)(keys_B, scaled_BV)
    return _checked(chosen_B, logits_BV)


def _allowed(logits_BV: jax.Array, top_k: int, top_p: float) -> jax.Array:
    """Which tokens may be drawn, bool [B, V]. They keep their places, so no ranking changes a token's random number."""
    order_BV = jnp.argsort(logits_BV, axis=-1, descending=True)
    sorted_BV = jnp.take_along_axis(logits_BV, order_BV, axis=-1)
    ranks_V = jnp.arange(logits_BV.shape[-1])
    within_BV = jnp.broadcast_to((top_k == 0) | (ranks_V < top_k), logits_BV.shape)
    probabilities_BV = jax.nn.softmax(jnp.where(within_BV, sorted_BV, -jnp.inf), axis=-1)
    before_BV = jnp.cumsum(probabilities_BV, axis=-1) - probabilities_BV
    within_BV &= (before_BV < top_p) | (ranks_V == 0)  # the likeliest always, also where top_p is 0 in float32
    return jnp.put_along_axis(jnp.zeros_like(within_BV), order_BV, within_BV, axis=-1, inplace=False)


def _checked(chosen_B: jax.Array, logits_BV: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(logits_BV.max(axis=-1)), chosen_B, -1).astype(jnp.int32)
