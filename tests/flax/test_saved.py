"""What a call of a Flax module saves for its derivative."""

import itertools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest

from fiddlex.flax.alone import alone
from fiddlex.flax.saved import _minimum_cut
from fiddlex.pipeline.codec import codec_of
from fiddlex.pipeline.residuals import SplitVjp


@st.composite
def graphs(draw: st.DrawFn) -> tuple[dict[int, list[int]], set[int], dict[int, float]]:
    """Arrays 0 … n − 1, of which each is made from earlier ones or from nothing, sinks, and sizes."""
    number = draw(st.integers(1, 7))
    made_from = {i: sorted(draw(st.sets(st.integers(0, i - 1), max_size=3))) if i else [] for i in range(number)}
    sinks = draw(st.sets(st.integers(0, number - 1), min_size=1))
    sizes = {i: float(draw(st.integers(1, 9))) for i in range(number)}
    return made_from, sinks, sizes


@hypothesis.given(graph=graphs())
@hypothesis.settings(deadline=None, max_examples=200)
def test_a_cut_is_the_smallest_from_which_the_sinks_are_made(
    graph: tuple[dict[int, list[int]], set[int], dict[int, float]],
) -> None:
    made_from, sinks, sizes = graph

    def suffices(saved: set[int]) -> bool:
        made = set[int]()
        for name, inputs in made_from.items():
            if name in saved or (inputs and made.issuperset(inputs)):
                made.add(name)
        return sinks <= made

    found = set(_minimum_cut(made_from, sinks, sizes))
    choices = (set(each) for n in range(len(sizes) + 1) for each in itertools.combinations(sizes, n))
    assert suffices(found)
    assert sum(map(sizes.__getitem__, found)) == min(sum(map(sizes.__getitem__, s)) for s in choices if suffices(s))


def gelu(w: jax.Array, x: jax.Array, again: None) -> jax.Array:
    return x + jax.nn.gelu(x @ w) @ w.T


def softmax(w: jax.Array, x: jax.Array, again: None) -> jax.Array:
    scores = jnp.einsum("sh,th->st", x @ w, x @ w, preferred_element_type=jnp.float32)
    return jax.nn.softmax(jnp.where(jnp.tri(len(x), dtype=bool), scores, -jnp.inf)).astype(x.dtype) @ x


def normed(w: jax.Array, x: jax.Array, again: None) -> jax.Array:
    x_f32 = x.astype(jnp.float32)
    variance = jnp.var(x_f32, axis=-1, keepdims=True)
    return ((x_f32 - x_f32.mean(-1, keepdims=True)) * jax.lax.rsqrt(variance + 1e-6)).astype(x.dtype) @ w @ w.T


def peak(w: jax.Array, x: jax.Array, again: None) -> jax.Array:
    """The comparison of `y` with its maximum needs the very `y` of the forward pass."""
    y = x * w[:, 0] + w[:, 1]
    return x + jnp.tanh((y - y.max(-1, keepdims=True)) @ w) @ w.T


def rectified(w: jax.Array, x: jax.Array, again: None) -> jax.Array:
    return x + jax.nn.relu(x @ w + w[0]) @ w.T


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (gelu, [((4, 8), "bfloat16"), ((4, 16), "bfloat16")]),  # the input, and GELU's
        # one array of the size of the scores, and a sum for each position
        (softmax, [((4, 8), "bfloat16"), *2 * [((4, 16), "bfloat16")], ((4, 4), "float32"), ((4, 1), "float32")]),
        (normed, [((4, 8), "bfloat16"), *3 * [((4, 1), "float32")], ((4, 16), "bfloat16")]),  # sums of each position
        # the input, `y`, and of each position the maximum and how many elements have it
        (peak, [*2 * [((4, 8), "bfloat16")], *2 * [((4,), "bfloat16")], ((4, 16), "bfloat16")]),
        (rectified, [((4, 8), "bfloat16"), ((4, 16), "bfloat16")]),
    ],
    ids=["gelu", "softmax", "norm", "peak", "rectified"],
)
def test_arrays_that_follow_by_elementwise_work_are_made_again(
    function: object, expected: list[tuple[tuple[int, ...], str]]
) -> None:
    types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8, 16), (4, 8))]
    stashed = jax.eval_shape(lambda w, x: SplitVjp(alone(function)).forward(w, x, None)[1], *types)  # type: ignore[arg-type]
    assert sorted((each.shape, each.dtype.name) for each in stashed) == sorted(expected)


def attention(w: jax.Array, x: jax.Array, again: None) -> jax.Array:
    """With masked scores of −1e9, which must not decide on the scale of the others in a stash of 8 bits."""
    y = x @ w
    scores = jnp.where(jnp.tri(x.shape[1], dtype=bool), jnp.einsum("bsh,bth->bst", y, y) / 8, -1e9)
    return x + jnp.exp(scores - jax.nn.logsumexp(scores, axis=-1, keepdims=True)) @ y @ w.T


def quotient(w: jax.Array, x: jax.Array, again: None) -> jax.Array:
    """Its denominator has no gradient, so that the derivative alone divides by it."""
    return x + (x @ w / jax.lax.stop_gradient(jnp.abs(x @ w[:, ::-1]) + 1e-3)) @ w.T


@jax.custom_vjp
def shared(x: jax.Array, by: jax.Array) -> jax.Array:
    """`x / by`, with a derivative that divides by a broadcast array."""
    return x / by[:, None]


shared.defvjp(lambda x, by: (shared(x, by), by), lambda by, g: (g / by[:, None], jnp.zeros_like(by)))


def of_its_own(w: jax.Array, x: jax.Array, again: None) -> jax.Array:
    return x + shared(x @ w, jnp.abs(x @ w[:, ::-1])[:, 0] + 1e-3) @ w.T


def inverse(w: jax.Array, x: jax.Array, again: None) -> jax.Array:
    y = x @ w
    return x + (y * (jnp.square(y) + 1e-3) ** -1) @ w.T


def waves(w: jax.Array, x: jax.Array, again: None) -> jax.Array:
    return x + jnp.sin(30 * (x @ w)) @ w.T


@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("function", [attention, peak, quotient, of_its_own, inverse, waves])
def test_a_stash_of_8_bits_rounds_nothing_whose_errors_grow(function: Any, kind: str) -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    w, x, dy = (
        jax.random.normal(key, shape) / 4 for key, shape in zip(keys, [(8, 16), (2, 32, 8), (2, 32, 8)], strict=True)
    )
    expected = jax.vjp(lambda w, x: function(w, x, None), w, x)[1](dy)
    split = SplitVjp(alone(function), codec=codec_of(kind))
    _, stashed, _ = split.forward(w, x, None)
    found = split.backward(w, None, stashed, dy)
    for each, wanted in zip(found, expected, strict=True):
        assert jnp.linalg.norm(each - wanted) < 0.05 * jnp.linalg.norm(wanted)


def test_no_part_of_a_backward_pass_leaves_what_elementwise_work_makes_of_the_stash() -> None:
    w, x = jnp.ones((8, 16)), jnp.ones((4, 8))
    split = SplitVjp(alone(gelu))
    _, stashed, _ = split.forward(w, x, None)
    left = split.backward_input(w, None, stashed, x).left
    assert sorted(each.shape for each in left) == [(4, 8), (4, 16)]  # gradients of the results of two products
