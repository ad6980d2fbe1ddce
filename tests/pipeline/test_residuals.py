"""A backward pass in parts gives what `jax.vjp` gives, keeps nothing twice, and puts off the products of weights."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest

from fiddlex.models.operators import add_bias, gelu, layer_norm
from fiddlex.models.products import product
from fiddlex.pipeline.residuals import SplitVjp

TOKENS, HIDDEN, UNITS = (2, 3), 4, 8


def mlp(weights: dict, x: jax.Array, again: Any) -> jax.Array:
    """What a layer has: norms, biases, products, a residual branch, and a mask drawn from a key that is given again."""
    number, key = again
    y = layer_norm(x, weights["scale"], weights["shift"], 1e-5)
    y = gelu(add_bias(product(y, weights["up"]), weights["bias"]))
    keep = jax.random.bernoulli(jax.random.fold_in(key, number), 0.9, y.shape)
    return x + product(jnp.where(keep, y, 0), weights["down"])


def inner_jit(weights: dict, x: jax.Array, again: Any) -> jax.Array:
    """Both gradients of a product come out of one inner call, unless it is looked into."""
    return x + jax.jit(lambda w, x: jnp.tanh(x @ w))(weights["square"], x)


def constants(weights: dict, x: jax.Array, again: Any) -> jax.Array:
    """A residual that is a constant, an argument twice over, and the input itself."""
    table = jnp.arange(HIDDEN, dtype=jnp.float32)
    return x * x * table + (x @ weights["square"]) * (x @ weights["square"]) * again[0]


def literals(weights: dict, x: jax.Array, again: Any) -> jax.Array:
    """Residuals that are numbers of the program, as a layer of the user's may have."""
    return x + jnp.sin(x @ weights["square"]) * 2.0 / (1.0 - 0.1)


@pytest.fixture
def weights() -> dict[str, jax.Array]:
    keys = iter(jax.random.split(jax.random.key(0), 6))
    shapes = {
        "up": (HIDDEN, UNITS),
        "down": (UNITS, HIDDEN),
        "bias": (UNITS,),
        "scale": (HIDDEN,),
        "shift": (HIDDEN,),
        "square": (HIDDEN, HIDDEN),
    }
    return {name: 0.3 * jax.random.normal(next(keys), shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("function", [mlp, inner_jit, constants, literals])
def test_parts_give_what_vjp_gives(function: Any, recompute: bool, weights: dict[str, jax.Array]) -> None:
    x, dy = jax.random.normal(jax.random.key(1), (2, *TOKENS, HIDDEN))
    again = (jnp.int32(3), jax.random.key(2))
    value, vjp = jax.vjp(lambda weights, x: function(weights, x, again), weights, x)
    wanted = vjp(dy)
    split = SplitVjp(function, recompute=recompute)
    y, stashed, _ = jax.jit(split.forward)(weights, x, again)
    whole = jax.jit(split.backward)(weights, again, stashed, dy)
    first = jax.jit(split.backward_input)(weights, again, stashed, dy)
    second = jax.jit(split.backward_weights)(weights, again, stashed, first.left, jnp.full_like(dy, jnp.nan))
    assert all((early is None) != (late is None) for early, late in zip(first.dgiven, second, strict=True))
    both = [late if early is None else early for early, late in zip(first.dgiven, second, strict=True)]
    chex.assert_trees_all_close(y, value, rtol=1e-6)
    chex.assert_trees_all_close(whole, wanted, rtol=1e-5, atol=1e-6)
    parts = (jax.tree.unflatten(jax.tree.structure(weights), both), first.dx)
    chex.assert_trees_all_close(parts, wanted, rtol=1e-5, atol=1e-6)


def test_only_what_is_needed_is_kept(weights: dict[str, jax.Array]) -> None:
    x, again = jnp.ones((*TOKENS, HIDDEN)), (jnp.int32(3), jax.random.key(2))
    kept = SplitVjp(mlp).forward(weights, x, again)[1]
    # x, the two products' inputs, GELU's input and the mask; no weight.
    assert sorted((leaf.shape[-1], leaf.dtype.name) for leaf in kept) == [
        (HIDDEN, "float32"),
        (HIDDEN, "float32"),
        (UNITS, "bool"),
        (UNITS, "float32"),
        (UNITS, "float32"),
    ]
    assert [leaf.shape for leaf in SplitVjp(mlp, recompute=True).forward(weights, x, again)[1]] == [x.shape]


def test_products_of_weights_are_put_off_and_nothing_else(weights: dict[str, jax.Array]) -> None:
    x, again = jnp.ones((*TOKENS, HIDDEN)), (jnp.int32(3), jax.random.key(2))
    split = SplitVjp(mlp)
    stashed = split.forward(weights, x, again)[1]
    first = split.backward_input(weights, again, stashed, x)
    late = {name for name, grad in zip(sorted(weights), first.dgiven, strict=True) if grad is None}
    assert late == {"up", "down"}
    assert sorted(leaf.size // 6 for leaf in first.left) == [HIDDEN, UNITS]  # the gradients of the products' outputs

    def products(function: Any, *args: Any) -> int:
        return str(jax.make_jaxpr(function)(*args)).count("dot_general")

    assert products(lambda: split.backward_input(weights, again, stashed, x)) == 2
    assert products(lambda: split.backward_weights(weights, again, stashed, first.left, x)) == 2


def test_arguments_of_the_same_types_are_traced_once(weights: dict[str, jax.Array]) -> None:
    x, again, traces = jnp.ones((*TOKENS, HIDDEN)), (jnp.int32(3), jax.random.key(2)), []

    def counted(*args: Any) -> jax.Array:
        traces.append(args)
        return mlp(*args)

    split = SplitVjp(counted)
    stashed = split.forward(weights, x, again)[1]
    jax.jit(split.forward)(weights, 2 * x, again)
    split.backward(weights, again, stashed, x)
    first = jax.jit(split.backward_input)(weights, again, stashed, x)
    split.backward_weights(weights, again, stashed, first.left, x)
    assert len(traces) == 1
    split.forward(weights, x[:1], again)
    assert len(traces) == 2
