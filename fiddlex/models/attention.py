"""Scaled dot-product attention over the heads that a tensor rank holds.

Where the devices support it, attention runs in cuDNN's flash kernel, through `jax.nn.dot_product_attention`. That
kernel has no dropout, so training with dropout computes the probabilities explicitly, and so does every device without
the kernel.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from fiddlex.models.context import Context
from fiddlex.models.operators import attention_probabilities


def attend(q_BSND: jax.Array, k_BSND: jax.Array, v_BSND: jax.Array, context: Context) -> jax.Array:
    """Attention of each position to its own segment and, if causal, not to later positions (`Context`).

    With `recompute="selective"` the backward pass recomputes scores and probabilities instead of saving them
    (Korthikanti et al., MLSys 2023, section 5); the flash kernel always recomputes them.

    Args:
      q_BSND: queries.
      k_BSND: keys.
      v_BSND: values.
      context: the settings of the microbatch.

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
        attention = jax.checkpoint(attention, prevent_cse=False)  # inside the loop over layers CSE has nothing to merge
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
    """Which pairs share a segment, bool [B, 1, S, S]; None: all do. Every position sees itself, even padding."""
    if context.segments_BS is None:
        return None
    return (context.segments_BS[:, :, None] == context.segments_BS[:, None, :])[:, None]
