"""Dynamic loss scaling for float16 (Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2).

Losses are multiplied by a scale before the backward pass, so that small gradients do not round to zero, and gradients
are divided by the scale before any other use. When a gradient overflows, the train step skips the update: weights,
optimizer state and update count do not change. A batch has one scale from its first backward pass to its last. With
several batches in flight (`fiddlex.train.step.unflushed`), a batch's scale is therefore fixed before it is known
whether the previous batch overflows. A layout with fewer batches in flight than the delay of the weights allows fixes
scales as early, so that all layouts skip the same updates.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fiddlex.config import OptimizerConfig
from fiddlex.config.sections import MOST_LOSS_SCALE


class Scaling(NamedTuple):
    """The part of a train state that scales losses."""

    # float32 [1 + delay], of the next batch and of as many later ones as may be in flight with it in any layout
    scales: Any
    good_steps: Any  # int32, number of updates since the scale last changed


def start_scaling(config: OptimizerConfig, delay: int) -> Scaling:
    """The scaling at the start of a run whose weights lag by up to `delay` updates."""
    scales = jnp.full(1 + delay, config.loss_scale, jnp.float32)
    return Scaling(scales, jnp.int32(0))


def next_scaling(scaling: Scaling, finite: jax.Array, config: OptimizerConfig) -> Scaling:
    """The scaling after a step; `finite` says whether the step's gradients were finite.

    After an overflow, the new scale is at most half of the scale of the batch that overflowed: other batches in flight
    with that same scale may overflow too, and do not halve it again. The scale doubles after `loss_scale_window`
    consecutive updates.
    """
    newest = scaling.scales[-1]
    good_steps = jnp.where(finite, scaling.good_steps + 1, 0)
    grows = good_steps >= config.loss_scale_window
    grown = jnp.where(grows, jnp.minimum(newest * 2, MOST_LOSS_SCALE), newest)
    newest = jnp.where(finite, grown, jnp.minimum(newest, scaling.scales[0] / 2))
    return Scaling(
        jnp.append(scaling.scales[1:], newest),
        jnp.where(grows, 0, good_steps),
    )


def fit(scaling: Scaling, delay: int) -> Scaling:
    """The scaling for another delay; repeats the newest scale where scales are missing."""
    scales = jnp.pad(scaling.scales, (0, max(1 + delay - len(scaling.scales), 0)), mode="edge")
    return scaling._replace(scales=scales[: 1 + delay])
