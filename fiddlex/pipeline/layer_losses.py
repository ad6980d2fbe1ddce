"""Losses that layers add to the loss of the head, such as those that balance experts.

A layer returns `(x, loss)` in place of `x`. The weight of the loss in the objective is known before the pass: the
layer's own backward pass starts from it, and nothing travels between ranks.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from fiddlex.parallel.collectives import as_varying_over, axes_of

# A microbatch's weights of such losses, float32 [example, 2]: of the value, and of the gradient. Their sums count.
WEIGHTS = "layer_losses"


def split(result: Any) -> tuple[Any, list[jax.Array]]:
    """What a layer returned as `x` and its losses, none or one."""
    x, *losses = result if isinstance(result, tuple) else (result,)
    return x, losses


def weighted(result: tuple[jax.Array, jax.Array], weights_B2: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`x`, whose derivative brings the gradient of the weighted loss, and the weighted value, a float32 scalar."""
    x, loss = result
    axes = (axes_of(x) | axes_of(weights_B2)) - {"tensor"}  # tensor ranks have the same loss, also of parts of `x`
    loss = as_varying_over(jnp.asarray(loss, jnp.float32), axes)
    return _with_gradient(x, loss, weights_B2, axes), loss * weights_B2[:, 0].sum()


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _with_gradient(x: jax.Array, loss: jax.Array, weights_B2: jax.Array, axes: frozenset[str]) -> jax.Array:
    return x


def _forward(x: jax.Array, loss: jax.Array, weights_B2: jax.Array, axes: frozenset[str]) -> tuple[jax.Array, jax.Array]:
    return x, weights_B2  # an argument of the pass, which no stash has to hold


def _backward(axes: frozenset[str], weights_B2: jax.Array, dx: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    return dx, as_varying_over(weights_B2[:, 1].sum(), axes), jnp.zeros_like(weights_B2)


_with_gradient.defvjp(_forward, _backward)
