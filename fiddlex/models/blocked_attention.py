"""Attention in blocks of queries, in XLA's own operations, for CPUs, which have no kernel of their own.

The program computes the scores of one block of queries at a time and keeps none of them. A causal model leaves out the
keys that no query of the block sees. The backward pass recomputes the scores from the logarithm of the sum of each
row's exponentials, which the forward pass saves (Dao et al., FlashAttention, NeurIPS 2022, section 3.1). Scores and
their softmax are float32; products of probabilities run in the compute dtype.

Shape suffixes: B example, S position, N head of queries, K head of keys and values, G head of queries that shares a
head of keys with others, D head size. Q is the positions of a block, E those that a block sees.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from fiddlex.config.values.stash import STATISTICS
from fiddlex.hardware.flash import block_length
from fiddlex.models.context import AttentionKernel

Arrays = tuple[jax.Array, ...]


def blocked_attention(*, causal: bool) -> AttentionKernel:
    """Makes `(q_BSND, k_BSKD, v_BSKD, segments_BS) -> y_BSND`.

    Its backward pass saves queries, keys, values, the result, and one float32 for each row of the scores.
    """

    @jax.custom_vjp
    def attention(q_BSND: jax.Array, k_BSKD: jax.Array, v_BSKD: jax.Array, segments_BS: jax.Array | None) -> jax.Array:
        return forward(q_BSND, k_BSKD, v_BSKD, segments_BS)[0]

    def forward(
        q_BSND: jax.Array, k_BSKD: jax.Array, v_BSKD: jax.Array, segments_BS: jax.Array | None
    ) -> tuple[jax.Array, Any]:
        y_BKGSD, sums_BKGS = _for_each_head(functools.partial(_forward, causal=causal))(
            segments_BS, *_given(q_BSND, k_BSKD, v_BSKD)
        )
        y_BSND = _by_position(y_BKGSD)
        sums_BKGS = checkpoint_name(sums_BKGS, STATISTICS)
        # The product after attention saves its input: the same array, which is then stashed once.
        return y_BSND, (q_BSND, k_BSKD, v_BSKD, segments_BS, y_BSND, sums_BKGS)

    def backward(saved: Any, g_BSND: jax.Array) -> tuple[jax.Array | None, ...]:
        q_BSND, k_BSKD, v_BSKD, segments_BS, y_BSND, sums_BKGS = saved
        kv_heads = k_BSKD.shape[2]
        means_BSN = (g_BSND.astype(jnp.float32) * y_BSND.astype(jnp.float32)).sum(axis=-1)
        means_BKGS = _by_head(means_BSN[..., None], kv_heads)[..., 0]
        dq_BKGSD, dk_BKSD, dv_BKSD = _for_each_head(functools.partial(_backward, causal=causal))(
            segments_BS, *_given(q_BSND, k_BSKD, v_BSKD), sums_BKGS, _by_head(g_BSND, kv_heads), means_BKGS
        )
        return _by_position(dq_BKGSD), jnp.swapaxes(dk_BKSD, 1, 2), jnp.swapaxes(dv_BKSD, 1, 2), None

    attention.defvjp(forward, backward)
    return attention


def _given(q_BSND: jax.Array, k_BSKD: jax.Array, v_BSKD: jax.Array) -> Arrays:
    """The inputs by head of keys and values: queries [B, K, G, S, D], keys and values [B, K, S, D]."""
    return _by_head(q_BSND, k_BSKD.shape[2]), jnp.swapaxes(k_BSKD, 1, 2), jnp.swapaxes(v_BSKD, 1, 2)


def _by_head(x_BSND: jax.Array, kv_heads: int) -> jax.Array:
    batch, length, heads, size = x_BSND.shape
    return x_BSND.reshape(batch, length, kv_heads, heads // kv_heads, size).transpose(0, 2, 3, 1, 4)


def _by_position(x_BKGSD: jax.Array) -> jax.Array:
    batch, kv_heads, group, length, size = x_BKGSD.shape
    return x_BKGSD.transpose(0, 3, 1, 2, 4).reshape(batch, length, kv_heads * group, size)


def _for_each_head(function: Callable[..., Arrays]) -> Callable[..., Arrays]:
    """`function` for every example and every head of keys; its first argument, the segments, has no heads."""

    def of_example(segments_S: jax.Array | None, *by_head: jax.Array) -> Arrays:
        return jax.vmap(functools.partial(function, segments_S))(*by_head)

    return jax.vmap(of_example)


def _forward(
    segments_S: jax.Array | None, q_GSD: jax.Array, k_SD: jax.Array, v_SD: jax.Array, *, causal: bool
) -> Arrays:
    """The result, [G, S, D], and the logarithm of the sum of each row's exponentials, float32 [G, S]."""
    results, sums = [], []
    for block in _blocks(len(k_SD), causal=causal):
        scores_GQE = block.scores(segments_S, q_GSD, k_SD)
        highest_GQ1 = scores_GQE.max(axis=-1, keepdims=True)
        exponentials_GQE = jnp.exp(scores_GQE - highest_GQ1)
        total_GQ1 = exponentials_GQE.sum(axis=-1, keepdims=True)
        # Exponentials, unlike probabilities, add up to as much as the number of keys: float16 may be too small for y.
        y_GQD = jnp.einsum(
            "gqe,ed->gqd", exponentials_GQE.astype(v_SD.dtype), v_SD[block.keys], preferred_element_type=jnp.float32
        )
        results.append((y_GQD / total_GQ1).astype(v_SD.dtype))
        sums.append((highest_GQ1 + jnp.log(total_GQ1))[..., 0])
    return jnp.concatenate(results, axis=1), jnp.concatenate(sums, axis=1)


def _backward(
    segments_S: jax.Array | None,
    q_GSD: jax.Array,
    k_SD: jax.Array,
    v_SD: jax.Array,
    sums_GS: jax.Array,
    g_GSD: jax.Array,
    means_GS: jax.Array,
    *,
    causal: bool,
) -> Arrays:
    """The gradients of queries, keys and values.

    `sums_GS` is as from `_forward`. `means_GS`, float32, is the product of the result and its gradient, summed over D:
    the mean of the gradient of a row's probabilities, weighted by these.
    """
    dtype, dq, dk, dv = q_GSD.dtype, [], [], []
    for block in _blocks(len(k_SD), causal=causal):
        q_GQD, g_GQD, keys_ED = q_GSD[:, block.queries], g_GSD[:, block.queries], k_SD[block.keys]
        scores_GQE = block.scores(segments_S, q_GSD, k_SD)
        probabilities_GQE = jnp.exp(scores_GQE - sums_GS[:, block.queries, None])
        of_probabilities_GQE = jnp.einsum("gqd,ed->gqe", g_GQD, v_SD[block.keys], preferred_element_type=jnp.float32)
        of_scores_GQE = probabilities_GQE * (of_probabilities_GQE - means_GS[:, block.queries, None])
        # The barrier keeps XLA's CPU backend from computing these once for each product that uses them.
        of_scores_GQE, probabilities_GQE = lax.optimization_barrier(
            ((of_scores_GQE / math.sqrt(q_GSD.shape[-1])).astype(dtype), probabilities_GQE.astype(dtype))
        )
        dq.append(jnp.einsum("gqe,ed->gqd", of_scores_GQE, keys_ED))
        dk.append(of_scores_GQE.reshape(-1, len(keys_ED)).T @ q_GQD.reshape(-1, q_GQD.shape[-1]))
        dv.append(probabilities_GQE.reshape(-1, len(keys_ED)).T @ g_GQD.reshape(-1, g_GQD.shape[-1]))
    return jnp.concatenate(dq, axis=1), _summed(dk, len(k_SD)), _summed(dv, len(k_SD))


def _summed(parts: Sequence[jax.Array], length: int) -> jax.Array:
    """The sum of arrays [E, D] of the first E positions, [S, D]."""
    size = block_length(length)
    starts = range(0, length, size)
    return jnp.concatenate([sum(part[start : start + size] for part in parts if len(part) > start) for start in starts])


class _Block(NamedTuple):
    """A block of queries."""

    queries: slice  # the positions of the block, Q
    keys: slice  # the positions that its queries may see, E
    causal: bool  # whether a query sees no later position

    def scores(self, segments_S: jax.Array | None, q_GSD: jax.Array, k_SD: jax.Array) -> jax.Array:
        """The scaled scores, float32 [G, Q, E]; the lowest float where a query does not see a key."""
        scores_GQE = jnp.einsum(
            "gqd,ed->gqe", q_GSD[:, self.queries], k_SD[self.keys], preferred_element_type=jnp.float32
        )
        scores_GQE /= math.sqrt(q_GSD.shape[-1])
        lowest = jnp.finfo(jnp.float32).min
        if self.causal:
            positions_E = jnp.arange(self.keys.stop)
            scores_GQE = jnp.where(positions_E[self.queries, None] >= positions_E, scores_GQE, lowest)
        if segments_S is not None:
            scores_GQE = jnp.where(segments_S[self.queries, None] == segments_S[self.keys], scores_GQE, lowest)
        return scores_GQE


def _blocks(length: int, *, causal: bool) -> Iterator[_Block]:
    size = block_length(length)
    for start in range(0, length, size):
        yield _Block(slice(start, start + size), slice(0, start + size if causal else length), causal)
