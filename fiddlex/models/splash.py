"""Attention in jax's "splash" kernel for TPUs, for use inside `shard_map`.

jax's module states no mesh axes over which the kernel's results vary, so a `shard_map` that checks them (`check_vma`)
refuses to trace the kernel. Therefore this module traces forward and backward pass outside `shard_map`, for one
sequence of one device, and inside `shard_map` evaluates both traces and marks their results as varying over the axes
over which the queries vary. That is right, because the traces hold no collective.

The kernel skips blocks of scores that a causal model masks, sums in float32, and reads each head of keys and values for
all heads of queries that it serves. The backward pass recomputes the scores from the sum of each row's exponentials,
whose logarithm the forward pass saves. In memory and in the kernel, heads narrower than 128 are padded to 128 elements.

What the backward pass needs is saved with the heads side by side, so that the stash needs no such padding.

Shape suffixes: B example, S position, N head of queries, K head of keys and values, D head size, A the joint width of
heads.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.extend import core

from fiddlex.cluster.jax_settings import fixed_settings
from fiddlex.config.values.stash import STATISTICS
from fiddlex.hardware.flash import SPLASH_BLOCK
from fiddlex.models.context import AttentionKernel

Arrays = tuple[jax.Array, ...]


class Sizes(NamedTuple):
    """The sizes of attention on a device."""

    length: int  # positions of a sequence, S
    heads: int  # heads of queries, N
    kv_heads: int  # heads of keys and values, K
    head_size: int  # elements of a head, D


def splash_attention(
    sizes: Sizes, dtype: jnp.dtype, *, causal: bool, segmented: bool, interpret: bool = False
) -> AttentionKernel:
    """Makes `(q_BSND, k_BSKD, v_BSKD, segments_BS) -> y_BSA`, which runs inside `shard_map`; call this outside.

    The backward pass saves queries, keys, values, the result, and one float32 for each row of the scores.

    Args:
      sizes: on one device; the length is a multiple of 128.
      dtype: of queries, keys and values, bfloat16 or float32.
      causal: whether a position attends only to itself and to earlier positions.
      segmented: whether a position attends only to its own segment; if not, `segments_BS` is None.
      interpret: whether to run the kernel step by step as a program of XLA's, which any device can; for tests.
    """
    traced = _trace(sizes, jnp.dtype(dtype), causal, segmented, interpret)

    def by_head(x: jax.Array, number: int) -> jax.Array:
        """[B, S, A] as [B, number, S, D]."""
        return jnp.swapaxes(x.reshape(*x.shape[:2], number, sizes.head_size), 1, 2)

    def scaled(x: jax.Array) -> jax.Array:
        return (x.astype(jnp.float32) / math.sqrt(sizes.head_size)).astype(x.dtype)

    def given(q_BSA: jax.Array, k_BSA: jax.Array, v_BSA: jax.Array) -> Arrays:
        kv_heads = sizes.kv_heads
        return by_head(scaled(q_BSA), sizes.heads), by_head(k_BSA, kv_heads), by_head(v_BSA, kv_heads)

    @jax.custom_vjp
    def attention(q_BSA: jax.Array, k_BSA: jax.Array, v_BSA: jax.Array, segments_BS: jax.Array | None) -> jax.Array:
        return forward(q_BSA, k_BSA, v_BSA, segments_BS)[0]

    def forward(
        q_BSA: jax.Array, k_BSA: jax.Array, v_BSA: jax.Array, segments_BS: jax.Array | None
    ) -> tuple[jax.Array, Any]:
        y_BNSD, sums_BNS = jax.vmap(traced.forward)(given(q_BSA, k_BSA, v_BSA), segments_BS)
        y_BSA, sums_BNS = _varying_like(q_BSA, _side_by_side(y_BNSD), sums_BNS)
        sums_BNS = checkpoint_name(sums_BNS, STATISTICS)
        # The product after attention saves its input: the same array, which is then stashed once.
        return y_BSA, (q_BSA, k_BSA, v_BSA, segments_BS, y_BSA, sums_BNS)

    def backward(saved: Any, g_BSA: jax.Array) -> tuple[jax.Array | None, ...]:
        q_BSA, k_BSA, v_BSA, segments_BS, y_BSA, sums_BNS = saved
        results = by_head(y_BSA, sizes.heads), sums_BNS, by_head(g_BSA, sizes.heads)
        gradients = jax.vmap(traced.backward)(given(q_BSA, k_BSA, v_BSA), segments_BS, *results)
        dq_BSA, dk_BSA, dv_BSA = _varying_like(q_BSA, *map(_side_by_side, gradients))
        return scaled(dq_BSA), dk_BSA, dv_BSA, None

    attention.defvjp(forward, backward)

    def kernel(q_BSND: jax.Array, k_BSKD: jax.Array, v_BSKD: jax.Array, segments_BS: jax.Array | None) -> jax.Array:
        return attention(*(x.reshape(*x.shape[:2], -1) for x in (q_BSND, k_BSKD, v_BSKD)), segments_BS)

    return kernel


def _side_by_side(x_BNSD: jax.Array) -> jax.Array:
    batch, heads, length, size = x_BNSD.shape
    return jnp.swapaxes(x_BNSD, 1, 2).reshape(batch, length, heads * size)


def _varying_like(like: jax.Array, *arrays: jax.Array) -> Arrays:
    """Marks arrays as varying over the mesh axes over which `like` varies."""

    def marked(x: jax.Array) -> jax.Array:
        varying = [jax.typeof(each).manual_axis_type.varying for each in (like, x)]
        axes = tuple(sorted(varying[0] - varying[1]))
        return lax.pcast(x, axes, to="varying") if axes else x

    return tuple(map(marked, arrays))


class _Traced(NamedTuple):
    """The traces of the passes of one sequence."""

    # takes queries, keys, values and any segments; returns the result and what the vjp needs
    closed_forward: core.ClosedJaxpr
    # takes what the vjp needs and the gradient of the result; returns three gradients
    closed_backward: core.ClosedJaxpr

    def forward(self, given: Arrays, segments_S: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """The result, [N, S, D], and the logarithm of the sum of each row's exponentials, float32 [N, S]."""
        values = core.jaxpr_as_fun(self.closed_forward)(*_arguments(given, segments_S))
        by_name = dict(zip(self.closed_forward.jaxpr.outvars, values, strict=True))
        y_NSD, sums_NS = (by_name[name] for name in self._computed)
        return y_NSD, sums_NS

    def backward(
        self, given: Arrays, segments_S: jax.Array | None, y_NSD: jax.Array, sums_NS: jax.Array, g_NSD: jax.Array
    ) -> list[jax.Array]:
        jaxpr = self.closed_forward.jaxpr
        by_name = dict(zip(jaxpr.constvars, self.closed_forward.consts, strict=True))
        by_name |= dict(zip(jaxpr.invars, _arguments(given, segments_S), strict=True))
        by_name |= dict(zip(self._computed, (y_NSD, sums_NS), strict=True))
        gradients: list[jax.Array] = core.jaxpr_as_fun(self.closed_backward)(
            *(by_name[name] for name in jaxpr.outvars[1:]), g_NSD
        )
        return gradients

    @property
    def _computed(self) -> list[Any]:
        """The names of what the forward pass computes: the result first, then what only the backward pass needs."""
        jaxpr = self.closed_forward.jaxpr
        return [name for name in dict.fromkeys(jaxpr.outvars) if name not in {*jaxpr.invars, *jaxpr.constvars}]


def _arguments(given: Arrays, segments_S: jax.Array | None) -> Arrays:
    return given if segments_S is None else (*given, segments_S)


@functools.cache
@fixed_settings()
def _trace(sizes: Sizes, dtype: jnp.dtype, causal: bool, segmented: bool, interpret: bool) -> _Traced:
    length, heads, kv_heads, head_size = sizes
    mask = (masks.CausalMask if causal else masks.FullMask)((length, length))
    block = math.gcd(length, 4 * SPLASH_BLOCK)
    kernel = splash.make_splash_mha_single_device(
        masks.MultiHeadMask([mask]),  # the mask of every head
        block_sizes=splash.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_q_dq=block,
            block_kv_dq=block,
        ),
        interpret=interpret,
    )

    def attention(q_NSD: jax.Array, k_KSD: jax.Array, v_KSD: jax.Array, *segments_S: jax.Array) -> Any:
        return kernel(q_NSD, k_KSD, v_KSD, splash.SegmentIds(*segments_S * 2) if segments_S else None)

    q_NSD, k_KSD = (jax.ShapeDtypeStruct((number, length, head_size), dtype) for number in (heads, kv_heads))
    segments = [jax.ShapeDtypeStruct((length,), jnp.int32)] * segmented

    def with_vjp(q_NSD: jax.Array, k_KSD: jax.Array, v_KSD: jax.Array, *segments_S: jax.Array) -> Any:
        return jax.vjp(lambda *given: attention(*given, *segments_S), q_NSD, k_KSD, v_KSD)

    forward, (_, vjp) = jax.make_jaxpr(with_vjp, return_shape=True)(q_NSD, k_KSD, k_KSD, *segments)
    leaves, structure = jax.tree.flatten(vjp)
    backward = jax.make_jaxpr(lambda leaves, g_NSD: jax.tree.unflatten(structure, leaves)(g_NSD))(leaves, q_NSD)
    return _Traced(forward, backward)
