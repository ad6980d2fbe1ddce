"""Scaled dot-product attention over the heads that a tensor rank holds.

Attention goes through `jax.nn.dot_product_attention`, with cuDNN's flash kernel where the devices have it. The library
call has no dropout, so training with dropout computes the probabilities in the open.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from fiddlex.models.context import Context
from fiddlex.models.dropout import Dropout


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
    attention: Callable[..., jax.Array]
    if context.dropout is not None:
        attention = functools.partial(_attend_with_dropout, dropout=context.dropout)
    elif context.flash:
        return jax.nn.dot_product_attention(q_BSND, k_BSND, v_BSND, is_causal=True, implementation="cudnn")
    else:
        attention = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="xla")
    if context.recompute == "selective":
        attention = jax.checkpoint(attention, prevent_cse=False)  # inside the scan over layers nothing can be merged
    return attention(q_BSND, k_BSND, v_BSND)


def _attend_with_dropout(q_BSND: jax.Array, k_BSND: jax.Array, v_BSND: jax.Array, dropout: Dropout) -> jax.Array:
    length, size = q_BSND.shape[1], q_BSND.shape[3]
    scores_BNQK = jnp.einsum("bqnd,bknd->bnqk", q_BSND, k_BSND).astype(jnp.float32) / math.sqrt(size)
    causal_QK = jnp.tril(jnp.ones((length, length), bool))
    scores_BNQK = jnp.where(causal_QK, scores_BNQK, jnp.finfo(scores_BNQK.dtype).min)
    probabilities_BNQK = dropout.attention(jax.nn.softmax(scores_BNQK, axis=-1).astype(q_BSND.dtype))
    return jnp.einsum("bnqk,bknd->bqnd", probabilities_BNQK, v_BSND)
