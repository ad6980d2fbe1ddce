"""Encoded arrays come back within the bounds of their format, and gradients are those of activations that have."""

import functools
import math
from typing import Any

import chex
import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name

from fiddlex.config.values.stash import SCALE_ROW, STATISTICS, encoded_bytes
from fiddlex.models.operators import add_bias, gelu, layer_norm
from fiddlex.models.products import product
from fiddlex.pipeline.codec import Codec
from fiddlex.pipeline.residuals import SplitVjp

FORMATS = ("int8", "float8_e4m3fn")
SMALLEST = 1e-35  # rows below may become zeros


@functools.partial(jax.jit, static_argnums=1)
def there_and_back(x: jax.Array, stash_dtype: str) -> jax.Array:
    codec = Codec(stash_dtype)
    return codec.decode(codec.encode(x), x.dtype)


def round_trip(x: jax.Array, stash_dtype: str) -> np.ndarray:
    return np.asarray(there_and_back(x, stash_dtype), np.float64)


def oracle(x: np.ndarray, stash_dtype: str) -> np.ndarray:
    """What a row becomes, in numpy: scaled to the largest element of the format, rounded to it, and scaled back."""
    largest = {"int8": 127.0, "float8_e4m3fn": 448.0}[stash_dtype]
    scales = np.abs(x.astype(np.float32)).max(axis=-1, keepdims=True) / np.float32(largest)
    quotients = x.astype(np.float32) / np.where(scales > SMALLEST / 448, scales, np.inf)
    if stash_dtype == "int8":
        return np.rint(quotients) * scales
    return quotients.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scales


# Few shapes, since jax compiles the codec for each of them.
ARRAYS = hnp.arrays(
    np.float32,
    st.sampled_from([(1, 1), (3, 131), (2, 3, 64)]),
    elements=st.floats(-1, 1, width=32).map(lambda x: x**9),
    fill=st.just(0.0),
)


@settings(max_examples=60, deadline=None)
@given(
    ARRAYS,
    st.sampled_from([1e-30, 1e-3, 1.0, 6e4, 3e38]),
    st.sampled_from(["float32", "bfloat16", "float16"]),
    st.sampled_from(FORMATS),
)
def test_a_round_trip_stays_within_the_bounds_of_the_format(
    values: np.ndarray, size: float, dtype: str, stash_dtype: str
) -> None:
    x = jnp.asarray(values * np.float32(min(size, float(jnp.finfo(dtype).max))), dtype)
    exact = np.asarray(x, np.float64)
    found, most = round_trip(x, stash_dtype), np.abs(exact).max(axis=-1, keepdims=True)
    # int8 has equal steps; float8_e4m3fn has 3 bits behind the first, and equal steps below 2⁻⁶ of its scale.
    of_format = most / 127 / 2 if stash_dtype == "int8" else np.maximum(np.abs(exact) / 16, most / 448 * 2**-10)
    rounding = np.maximum(np.abs(found) * float(jnp.finfo(dtype).eps), float(jnp.finfo(dtype).smallest_subnormal))
    assert (np.abs(found - exact) <= of_format * (1 + 1e-5) + rounding + SMALLEST).all()
    assert (found[exact == 0] == 0).all()
    assert (found * exact >= 0).all()


@pytest.mark.parametrize("stash_dtype", FORMATS)
@pytest.mark.parametrize("width", [1, 3, 64, 131])
def test_values_are_those_of_numpy(width: int, stash_dtype: str) -> None:
    x = np.random.default_rng(width).standard_normal((3, 5, width)).astype(np.float32)
    x[1, 2] = 0
    np.testing.assert_allclose(round_trip(jnp.asarray(x), stash_dtype), oracle(x, stash_dtype), rtol=2e-7)


@pytest.mark.parametrize("stash_dtype", FORMATS)
@pytest.mark.parametrize("shape", [(2, 3, 4), (5, 131), (128, 2), (3, 43, 1)])
def test_an_encoded_array_takes_the_bytes_that_the_costs_count(shape: tuple[int, ...], stash_dtype: str) -> None:
    elements, scales = Codec(stash_dtype).encode(jnp.ones(shape, jnp.bfloat16))
    assert (elements.shape, elements.dtype) == (shape, stash_dtype)
    assert (scales.shape[-1], scales.dtype) == (SCALE_ROW, jnp.float32)
    assert elements.nbytes + scales.nbytes == encoded_bytes(math.prod(shape), shape[-1])


@pytest.mark.parametrize("stash_dtype", FORMATS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_no_value_that_is_not_finite_is_hidden(value: float, stash_dtype: str) -> None:
    x = jnp.ones((2, 3)).at[0, 1].set(value)
    found = round_trip(x, stash_dtype)
    assert not np.isfinite(found[0]).any()
    np.testing.assert_allclose(found[1], 1, rtol=1e-6)


TOKENS, HIDDEN, UNITS = (2, 3), 4, 8


def layer(weights: dict[str, jax.Array], x: jax.Array, again: Any) -> jax.Array:
    """A layer with each kind of array that a stash may hold; `again` is a mask, and integers of the batch."""
    mask, batch = again
    y = layer_norm(x, weights["scale"], weights["shift"], 1e-5)
    up = add_bias(product(y, weights["up"]), weights["bias"])
    sums = checkpoint_name(1 + up.mean(axis=-1, keepdims=True), STATISTICS)
    made = jnp.where(mask, gelu(up), 0)
    return x + product(made, weights["down"]) * sums * jnp.sin(batch.astype(jnp.float32))


@pytest.fixture
def weights() -> dict[str, jax.Array]:
    keys = iter(jax.random.split(jax.random.key(0), 5))
    shapes = {"up": (HIDDEN, UNITS), "down": (UNITS, HIDDEN), "bias": (UNITS,), "scale": (HIDDEN,), "shift": (HIDDEN,)}
    return {name: 0.5 * jax.random.normal(next(keys), shape) for name, shape in shapes.items()}


@pytest.fixture
def arguments() -> tuple[jax.Array, jax.Array, Any]:
    x, dy = jax.random.normal(jax.random.key(1), (2, *TOKENS, HIDDEN))
    mask = jax.random.bernoulli(jax.random.key(2), 0.8, (*TOKENS, UNITS))
    return x, dy, (mask, jax.random.randint(jax.random.key(3), (*TOKENS, 1), 0, 9))


def expected(weights: dict[str, jax.Array], x: jax.Array, again: Any, dy: jax.Array, stash_dtype: str) -> tuple:
    """The gradients of `layer`, written out, from activations that numpy has rounded to the format.

    The layer's input, the mask, the batch and the statistics are exact.
    """

    def rounded(value: jax.Array) -> jax.Array:
        return jnp.asarray(oracle(np.asarray(value), stash_dtype))

    mask, batch = again
    norm = lambda x, scale, shift: layer_norm(x, scale, shift, 1e-5)  # noqa: E731
    y, of_norm = jax.vjp(norm, x, weights["scale"], weights["shift"])
    up = y @ weights["up"] + weights["bias"]
    sums = 1 + up.mean(axis=-1, keepdims=True)
    made = jnp.where(mask, gelu(up), 0)
    down = made @ weights["down"]
    ddown = dy * sums * jnp.sin(batch.astype(jnp.float32))
    dsums = (dy * rounded(down) * jnp.sin(batch.astype(jnp.float32))).sum(axis=-1, keepdims=True)
    of_gelu = jax.vjp(gelu, rounded(up))[1]
    dup = of_gelu(jnp.where(mask, ddown @ weights["down"].T, 0))[0] + dsums / UNITS
    dx, dscale, dshift = of_norm(dup @ weights["up"].T)
    products = {
        "up": jnp.einsum("bsi,bso->io", rounded(y), dup),
        "down": jnp.einsum("bsi,bso->io", rounded(made), ddown),
    }
    return products | {"bias": dup.sum(axis=(0, 1)), "scale": dscale, "shift": dshift}, dx + dy


@pytest.mark.parametrize("stash_dtype", FORMATS)
def test_gradients_are_those_of_rounded_activations(
    stash_dtype: str, weights: dict[str, jax.Array], arguments: tuple[jax.Array, jax.Array, Any]
) -> None:
    x, dy, again = arguments
    split = SplitVjp(layer, codec=Codec(stash_dtype))
    y, stashed, _ = jax.jit(split.forward)(weights, x, again)
    chex.assert_trees_all_close(y, layer(weights, x, again), rtol=1e-6)  # computed with full values
    found = jax.jit(split.backward)(weights, again, stashed, dy)
    wanted = expected(weights, x, again, dy, stash_dtype)
    chex.assert_trees_all_close(found, wanted, rtol=1e-5, atol=1e-6)
    exact = jax.vjp(lambda weights, x: layer(weights, x, again), weights, x)[1](dy)
    with pytest.raises(AssertionError):
        chex.assert_trees_all_close(found, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stash_dtype", FORMATS)
def test_parts_of_a_backward_pass_decode_what_the_whole_decodes(
    stash_dtype: str, weights: dict[str, jax.Array], arguments: tuple[jax.Array, jax.Array, Any]
) -> None:
    x, dy, again = arguments
    split, exact = SplitVjp(layer, codec=Codec(stash_dtype)), SplitVjp(layer)
    stashed = split.forward(weights, x, again)[1]
    whole = jax.jit(split.backward)(weights, again, stashed, dy)
    first = jax.jit(split.backward_input)(weights, again, stashed, dy)
    second = jax.jit(split.backward_weights)(weights, again, stashed, first.left, jnp.full_like(dy, jnp.nan))
    both = [late if early is None else early for early, late in zip(first.dgiven, second, strict=True)]
    parts = (jax.tree.unflatten(jax.tree.structure(weights), both), first.dx)
    chex.assert_trees_all_close(parts, whole, rtol=1e-6, atol=1e-7)
    # W decodes the stash again, so that the weight stash holds what it holds without a codec.
    unencoded = exact.backward_input(weights, again, exact.forward(weights, x, again)[1], dy)
    assert [leaf.shape for leaf in first.left] == [leaf.shape for leaf in unencoded.left]


def test_only_activations_are_encoded(
    weights: dict[str, jax.Array], arguments: tuple[jax.Array, jax.Array, Any]
) -> None:
    x, _, (mask, batch) = arguments
    stashed = SplitVjp(layer, codec=Codec("int8")).forward(weights, x, (mask, batch))[1]
    kept = [leaf for leaf in stashed if leaf.dtype == jnp.float32 and leaf.shape[-1] != SCALE_ROW]
    assert sum(bool(leaf.shape == x.shape and (leaf == x).all()) for leaf in kept) == 1  # the layer's input
    assert sorted(leaf.shape[-1] for leaf in kept) == [1, 1, HIDDEN]  # also statistics, and the sines of the batch
    encoded = sorted(leaf.shape[-1] for leaf in stashed if leaf.dtype == jnp.int8)
    assert encoded == [HIDDEN, HIDDEN, UNITS, UNITS]
    full = SplitVjp(layer, recompute=True, codec=Codec("int8")).forward(weights, x, (mask, batch))[1]
    assert [leaf.dtype for leaf in full] == [x.dtype]


@pytest.mark.parametrize("stash_dtype", FORMATS)
def test_an_activation_that_is_not_finite_shows_in_the_gradients(
    stash_dtype: str, weights: dict[str, jax.Array], arguments: tuple[jax.Array, jax.Array, Any]
) -> None:
    x, dy, again = arguments
    split = SplitVjp(layer, codec=Codec(stash_dtype))
    stashed = split.forward(weights, x.at[0, 0, 0].set(jnp.inf), again)[1]
    dweights, _ = split.backward(weights, again, stashed, dy)
    assert not np.isfinite(dweights["up"]).all()
    assert not np.isfinite(dweights["down"]).all()
