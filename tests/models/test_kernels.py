"""The flash kernel of TPUs, run step by step on CPU, and that of CPUs against attention that computes all scores."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

from fiddlex.cluster.mesh import make_mesh
from fiddlex.config import MeshConfig
from fiddlex.hardware.flash import BLOCKED, SPLASH
from fiddlex.models.attention import attend
from fiddlex.models.blocked_attention import blocked_attention
from fiddlex.models.context import Context
from fiddlex.models.splash import Sizes, splash_attention

BLOCKS = 384  # positions: three blocks, of which a causal kernel skips some
Arrays = list[jax.Array]


class Shape(NamedTuple):
    """Global sizes, of which each of two tensor ranks has half of the heads."""

    length: int
    heads: int
    kv_heads: int
    head_size: int
    causal: bool
    segmented: bool


SHAPES = [
    Shape(BLOCKS, 4, 2, 64, causal=True, segmented=False),
    Shape(BLOCKS, 4, 4, 72, causal=False, segmented=True),
    Shape(BLOCKS, 8, 2, 128, causal=True, segmented=True),
    pytest.param(Shape(1024, 2, 2, 256, causal=True, segmented=False), marks=pytest.mark.long),
    pytest.param(Shape(128, 4, 2, 64, causal=False, segmented=False), marks=pytest.mark.long),
]
NONE = ""


@functools.cache
def compiled(shape: Shape, kernel: str) -> Callable[..., Arrays]:
    """`(q, k, v, segments, g) -> [y, dq, dk, dv]` of all heads, in a branch of a scan, on data=2 × tensor=2."""
    length, heads, kv_heads, head_size, causal, segmented = shape
    sizes = Sizes(length, heads // 2, kv_heads // 2, head_size)
    made = None
    if kernel == SPLASH:
        made = splash_attention(sizes, jnp.dtype(jnp.float32), causal=causal, segmented=segmented, interpret=True)
    elif kernel == BLOCKED:
        made = blocked_attention(causal=causal)

    def passes(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, g: jax.Array) -> Arrays:
        own = lax.pcast(segments, "tensor", to="varying") if segmented else None
        context = Context(False, made, causal=causal, segments_BS=own)

        def tick(carry: jax.Array, is_busy: jax.Array) -> tuple[jax.Array, Any]:
            y, backward = jax.vjp(lambda *given: attend(*given, context).reshape(q.shape), q, k, v)
            done = lax.cond(is_busy, lambda: (y, *backward(g)), lambda: tuple(map(jnp.zeros_like, (y, q, k, v))))
            return carry, done

        busy = lax.pcast(jnp.ones(1, bool), ("data", "tensor"), to="varying")
        return [each[0] for each in lax.scan(tick, jnp.zeros(()), busy)[1]]

    mesh = make_mesh(MeshConfig(data=2, tensor=2))
    by_head = P("data", None, "tensor")
    mapped = jax.shard_map(
        passes, mesh=mesh, in_specs=(by_head, by_head, by_head, P("data"), by_head), out_specs=[by_head] * 4
    )
    return jax.jit(mapped)


def drawn(shape: Shape, seed: int, spread: float) -> Arrays:
    """Queries and keys whose scores spread so far, values, segments of random lengths, and a gradient of the result."""
    random = np.random.default_rng(seed)
    sizes = [shape.heads, shape.kv_heads, shape.kv_heads, shape.heads]
    q, k, v, g = (random.normal(size=(2, shape.length, each, shape.head_size)) for each in sizes)
    segments = np.sort(random.integers(0, 4, (2, shape.length)), axis=1)
    return [*map(jnp.float32, (q * spread, k, v)), jnp.int32(segments), jnp.float32(g)]


@pytest.mark.parametrize("kernel", [SPLASH, BLOCKED])
@pytest.mark.parametrize("shape", SHAPES)
@hypothesis.settings(max_examples=5)
@hypothesis.given(seed=st.integers(0, 2**32 - 1), spread=st.sampled_from([0.1, 1.0, 8.0]))
def test_computes_what_attention_does(kernel: str, shape: Shape, seed: int, spread: float) -> None:
    arrays = drawn(shape, seed, spread)
    found, expected = (compiled(shape, each)(*arrays) for each in (kernel, NONE))
    for each, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(each, wanted, rtol=1e-4, atol=1e-5 * float(jnp.abs(wanted).max()))


def test_sums_of_many_values_fit_in_float16() -> None:
    """Exponentials of equal scores add up to the number of keys, and 256 · 300 is beyond float16's range."""
    q, v = jnp.zeros((1, 256, 1, 8), jnp.float16), jnp.full((1, 256, 1, 8), 300, jnp.float16)
    np.testing.assert_array_equal(blocked_attention(causal=True)(q, q, v, None), v)
