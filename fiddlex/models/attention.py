"""Scaled dot-product attention over the heads that a tensor rank holds.

Where the devices have it this is cuDNN's flash kernel, through `jax.nn.dot_product_attention`. That has no dropout, so
training with dropout, and all else, computes the probabilities in the open.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from fiddlex.models.context import Context
from fiddlex.models.operators import attention_probabilities


def attend(q_BSND: jax.Array, k_BSND: jax.Array, v_BSND: jax.Array, context: Context) -> jax.Array:
    """Attention of every position to those it may see: not to later ones, not to other segments (`Context`).

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
    if context.flash:
        mask_B1SS = _same_segment(context)
        return jax.nn.dot_product_attention(
            q_BSND, k_BSND, v_BSND, mask=mask_B1SS, is_causal=context.causal, implementation="cudnn"
        )
    attention: Callable[..., jax.Array] = functools.partial(_attend, context=context)
    if context.recompute == "selective":
        attention = jax.checkpoint(attention, prevent_cse=False)  # inside the scan over layers nothing can be merged
    return attention(q_BSND, k_BSND, v_BSND)


def _attend(q_BSND: jax.Array, k_BSND: jax.Array, v_BSND: jax.Array, context: Context) -> jax.Array:
    length = q_BSND.shape[1]
    visible = jnp.tril(jnp.ones((length, length), bool)) if context.causal else jnp.ones((), bool)
    mask_B1SS = _same_segment(context)
    probabilities_BNQK = attention_probabilities(q_BSND, k_BSND, visible if mask_B1SS is None else visible & mask_B1SS)
    if context.dropout is not None:
        probabilities_BNQK = context.dropout.attention(probabilities_BNQK)
    return jnp.einsum("bnqk,bknd->bqnd", probabilities_BNQK, v_BSND)


def _same_segment(context: Context) -> jax.Array | None:
    """Bool [B, 1, S, S]; None where there is but one segment. A position sees itself at least, padding too."""
    if context.segments_BS is None:
        return None
    return (context.segments_BS[:, :, None] == context.segments_BS[:, None, :])[:, None]
