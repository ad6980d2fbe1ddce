"""Scaled dot-product attention over the heads that a tensor rank holds.

Attention goes through `jax.nn.dot_product_attention`, with cuDNN's flash kernel where the backend has one. The library
call has no dropout, so training with attention dropout computes the probabilities in the open.
"""

import functools
import math

import jax
import jax.numpy as jnp

from fiddlex.models.dropout import Dropout


def attend(
    q_BSND: jax.Array, k_BSND: jax.Array, v_BSND: jax.Array, *, dropout: Dropout | None, recompute: bool
) -> jax.Array:
    """Causal attention.

    Args:
      q_BSND: queries.
      k_BSND: keys.
      v_BSND: values.
      dropout: drops attention probabilities; None drops nothing.
      recompute: compute scores and probabilities again in the backward pass instead of keeping them (selective
        recomputation, Korthikanti et al., MLSys 2023, section 5). A flash kernel does so by itself.

    Returns:
      [B, S, N, D] in the dtype of the inputs.
    """
    if dropout is not None:
        attention = functools.partial(_attend_with_dropout, dropout=dropout)
    else:
        implementation = "cudnn" if _has_flash(q_BSND.dtype, q_BSND.shape[-1]) else None
        attention = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=implementation)
    return (jax.checkpoint(attention) if recompute else attention)(q_BSND, k_BSND, v_BSND)


def _attend_with_dropout(q_BSND: jax.Array, k_BSND: jax.Array, v_BSND: jax.Array, dropout: Dropout) -> jax.Array:
    length, size = q_BSND.shape[1], q_BSND.shape[3]
    scores_BNQK = jnp.einsum("bqnd,bknd->bnqk", q_BSND, k_BSND, preferred_element_type=jnp.float32) / math.sqrt(size)
    causal_QK = jnp.tril(jnp.ones((length, length), bool))
    scores_BNQK = jnp.where(causal_QK, scores_BNQK, jnp.finfo(scores_BNQK.dtype).min)
    probabilities_BNQK = dropout.attention(jax.nn.softmax(scores_BNQK, axis=-1)).astype(q_BSND.dtype)
    return jnp.einsum("bnqk,bknd->bqnd", probabilities_BNQK, v_BSND)


@functools.cache
def _has_flash(dtype: jnp.dtype, head_size: int) -> bool:
    # cuDNN's kernel takes half precision and head sizes that are multiples of 8 up to 128, from Ampere on.
    if jax.default_backend() != "gpu" or dtype not in (jnp.bfloat16, jnp.float16) or head_size % 8 or head_size > 128:
        return False
    return float(getattr(jax.devices()[0], "compute_capability", 0)) >= 8.0
