"""Spikes: steps whose loss or gradient is far above what is usual in this run.

The train step itself compares, so that a step that is a spike does not change the weights. What is usual are running
means over about the last `_STEPS` good steps. Checkpoints have them, so a resumed run finds the same spikes as an
uninterrupted one.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

_STEPS = 50  # over which the means reach
_FIRST_STEPS = 20  # good steps of a run, before which nothing counts as a spike


class Usual(NamedTuple):
    """Running means over the good steps of a run; scalars."""

    loss: Any  # float32
    grad_norm: Any  # float32, the global norm of the gradient before clipping
    good_steps: Any  # int32


def start_usual() -> Usual:
    return Usual(jnp.float32(0), jnp.float32(0), jnp.int32(0))


def is_spike(usual: Usual, loss: jax.Array, grad_norm: jax.Array, *, bound: float) -> jax.Array:
    """Whether the loss or the norm is more than `bound` times as large as usual; a bool scalar."""
    above = (loss > bound * usual.loss) | (grad_norm > bound * usual.grad_norm)
    return above & (usual.good_steps >= _FIRST_STEPS)


def next_usual(usual: Usual, loss: jax.Array, grad_norm: jax.Array, *, good: jax.Array) -> Usual:
    """The means after a step, which only a good step changes."""
    share = jnp.maximum(1 / (usual.good_steps + 1), 1 / _STEPS).astype(jnp.float32)
    new = Usual(
        usual.loss + share * (loss - usual.loss),
        usual.grad_norm + share * (grad_norm - usual.grad_norm),
        usual.good_steps + 1,
    )
    return jax.tree.map(lambda a, b: jnp.where(good, b, a), usual, new)
