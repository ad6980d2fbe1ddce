"""Scaled dot-product attention over the heads that a tensor rank holds.

Where the devices have it this is cuDNN's flash kernel, through `jax.nn.dot_product_attention`. That has no dropout, so
training with dropout, and all else, computes the probabilities in the open.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from fiddlex.models.context import Context
from fiddlex.models.dropout import Dropout
from fiddlex.models.operators import attention_probabilities


def attend(q_BSND: jax.Array, k_BSND: jax.Array, v_BSND: jax.Array, context: Context) -> jax.Array:
    """Causal attention.

    With `recompute="selective"` scores and probabilities are computed again in the backward pass instead of kept
    (Korthikanti et al., MLSys 2023, section 5); the flash kernel does so by itself.

    Args:
      q_BSND: queries.
      k_BSND: keys.
      v_BSND: values.
      context: of the microbatch.

    Returns:
      [B, S, N, D] in the dtype of the inputs.
    """
    if context.flash and context.dropout is None:
        return jax.nn.dot_product_attention(q_BSND, k_BSND, v_BSND, is_causal=True, implementation="cudnn")
    attention: Callable[..., jax.Array] = functools.partial(_attend, dropout=context.dropout)
    if context.recompute == "selective":
        attention = jax.checkpoint(attention, prevent_cse=False)  # inside the scan over layers nothing can be merged
    return attention(q_BSND, k_BSND, v_BSND)


def _attend(q_BSND: jax.Array, k_BSND: jax.Array, v_BSND: jax.Array, dropout: Dropout | None) -> jax.Array:
    length = q_BSND.shape[1]
    probabilities_BNQK = attention_probabilities(q_BSND, k_BSND, jnp.tril(jnp.ones((length, length), bool)))
    if dropout is not None:
        probabilities_BNQK = dropout.attention(probabilities_BNQK)
    return jnp.einsum("bnqk,bknd->bqnd", probabilities_BNQK, v_BSND)
