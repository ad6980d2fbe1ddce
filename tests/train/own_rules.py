"""Update rules and a learning rate as a user writes them, for the layouts of `tests.train.layouts`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax


def rate(*, config: Any, num_steps: int) -> optax.Schedule:
    return optax.linear_schedule(config.learning_rate, config.learning_rate / 4, num_steps)


def belief(*, config: Any) -> optax.GradientTransformation:
    return optax.inject_hyperparams(optax.scale_by_belief)(b1=optax.linear_schedule(0.5, 0.9, 10), eps=1e-5)


def lion(*, config: Any) -> optax.GradientTransformation:
    return optax.scale_by_lion(config.beta1, config.beta2)


def nesterov(*, config: Any) -> optax.GradientTransformation:
    return optax.trace(0.9, nesterov=True)


def lamb(*, config: Any) -> optax.GradientTransformation:
    def matrices(weights: Any) -> Any:
        return jax.tree.map(lambda x: x.ndim > 1, weights)

    return optax.chain(optax.lamb(1.0, eps=1e-5, weight_decay=0.1, mask=matrices), optax.scale(-1))


def clipped(*, config: Any) -> optax.GradientTransformation:
    """Adam of a gradient whose largest layer decides by how much all of it is scaled down."""

    def scale(grads: Any, weights: Any) -> Any:
        largest = jnp.max(jnp.stack([optax.tree.norm(layer) for layer in grads["layers"]]))
        return jax.tree.map(lambda g: g * jnp.minimum(1, 0.01 / largest), grads)

    return optax.chain(optax.stateless(scale), optax.scale_by_adam(config.beta1, config.beta2, 1e-5))


def adafactor(*, config: Any) -> optax.GradientTransformation:
    return optax.chain(
        optax.scale_by_factored_rms(min_dim_size_to_factor=8, epsilon=1e-6), optax.clip_by_block_rms(1.0)
    )


def muon(*, config: Any) -> optax.GradientTransformation:
    """Muon for the matrices of layers, from inputs to outputs, and Adam for all other weights."""

    def number(path: Any, x: Any) -> optax.contrib.MuonDimensionNumbers | None:
        if path[0].key != "layers" or x.ndim < 2:
            return None
        inputs = x.ndim - 1 if path[-2].key == "out" else 1
        return optax.contrib.MuonDimensionNumbers(tuple(range(inputs)), tuple(range(inputs, x.ndim)))

    numbers = functools.partial(jax.tree.map_with_path, number)
    return optax.chain(optax.contrib.muon(1.0, eps=1e-5, muon_weight_dimension_numbers=numbers), optax.scale(-1))


for function, moments, elementwise in (
    (belief, 2, True),
    (lion, 1, True),
    (nesterov, 1, True),
    (lamb, 2, False),
    (clipped, 2, False),
    (adafactor, 1, False),
    (muon, 2, False),
):
    function.moments, function.elementwise = moments, elementwise  # type: ignore[attr-defined]
