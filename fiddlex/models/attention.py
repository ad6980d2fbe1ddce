"""Scaled dot-product attention over the heads that a tensor rank holds.

The heads of queries that share a head of keys and values count as further queries of that head (Ainslie et al., EMNLP
2023). Attention runs in a kernel where the devices have one that takes the model (`fiddlex.models.flash`). The kernels
have no dropout: with dropout, and on devices without a kernel, the probabilities are computed explicitly.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fiddlex.models.context import Context
from fiddlex.models.dropout import Dropout
from fiddlex.models.operators import attention_probabilities
from fiddlex.models.products import Arrays, Input, given, products


def attend(q_BSND: jax.Array, k_BSKD: jax.Array, v_BSKD: jax.Array, context: Context) -> jax.Array:
    """Attention of each position to its own segment and, if causal, not to later positions (`Context`).

    N is a multiple of K. With a key-value cache, the positions also attend to earlier ones (`LayerCache.attend`). With
    `attention` in `Context.recompute` the backward pass recomputes scores and probabilities instead of saving them
    (Korthikanti et al., MLSys 2023, section 5); a fused kernel always recomputes them.

    Returns:
      [B, S, N, D] in the dtype of the inputs, or with the heads side by side [B, S, N · D], as the kernel has it.
    """
    if context.cache is not None:
        return context.cache.attend(q_BSND, k_BSKD, v_BSKD)
    if context.kernel is not None:
        return context.kernel(q_BSND, k_BSKD, v_BSKD, context.segments_BS)
    attention: Callable[..., jax.Array] = functools.partial(_attend, context=context)
    if "attention" in context.recompute:
        attention = jax.checkpoint(attention, prevent_cse=False)  # inside the loop over layers CSE has nothing to merge
    return attention(q_BSND, k_BSKD, v_BSKD)


def _attend(q_BSND: jax.Array, k_BSKD: jax.Array, v_BSKD: jax.Array, context: Context) -> jax.Array:
    batch, length, heads, size = q_BSND.shape
    kv_heads = k_BSKD.shape[2]
    group = heads // kv_heads
    visible = jnp.tril(jnp.ones((length, length), bool)) if context.causal else jnp.ones((), bool)
    mask_B1SS = same_segment(context.segments_BS)
    mask = visible if mask_B1SS is None else visible & mask_B1SS
    if group > 1:  # [B, group · S, K, D]: all queries that share a key
        q_BSND = q_BSND.reshape(batch, length, kv_heads, group, size).transpose(0, 3, 1, 2, 4)
        q_BSND = q_BSND.reshape(batch, group * length, kv_heads, size)
        mask = jnp.concatenate([jnp.broadcast_to(mask, (*mask.shape[:-2], length, length))] * group, axis=-2)
    probabilities_BNQK = attention_probabilities(q_BSND, k_BSKD, mask)
    (y_BSND,) = products(_after_dropout(probabilities_BNQK, heads, context), (v_BSKD,), _Weighted())
    if group > 1:
        y_BSND = y_BSND.reshape(batch, group, length, kv_heads, size).transpose(0, 2, 3, 1, 4)
        y_BSND = y_BSND.reshape(batch, length, heads, size)
    return y_BSND


def _after_dropout(probabilities_BNQK: jax.Array, heads: int, context: Context) -> Input:
    if context.dropout is None:
        return given(probabilities_BNQK)
    dropout = context.dropout
    rate, length = dropout.rate, probabilities_BNQK.shape[3]

    def drop(probabilities_BNQK: jax.Array, keys_B: jax.Array, layer: jax.Array) -> jax.Array:
        by_head = probabilities_BNQK.reshape(-1, heads, length, length)
        return Dropout(rate, keys_B, layer).attention(by_head).reshape(probabilities_BNQK.shape)

    made = Input(drop, (probabilities_BNQK, dropout.keys_B, jnp.asarray(dropout.layer)))
    return made if dropout.redraws else made.saved()


class _Weighted(NamedTuple):
    """A `Rule` of values weighted by probabilities [B, N, Q, K]; the values [B, K, N, D] stand for a kernel."""

    def forward(self, x: jax.Array, kernels: Arrays) -> Arrays:
        return (jnp.einsum("bnqk,bknd->bqnd", x, kernels[0]),)

    def backward(self, x: jax.Array, kernels: Arrays, gs: Arrays) -> tuple[jax.Array, Arrays]:
        dx = jnp.einsum("bqnd,bknd->bnqk", gs[0], kernels[0])
        return dx, (jnp.einsum("bnqk,bqnd->bknd", x, gs[0]),)


def same_segment(segments_BS: jax.Array | None) -> jax.Array | None:
    """Which pairs share a segment, bool [B, 1, S, S]; None: all do. Every position sees itself, even padding."""
    if segments_BS is None:
        return None
    return (segments_BS[:, :, None] == segments_BS[:, None, :])[:, None]
