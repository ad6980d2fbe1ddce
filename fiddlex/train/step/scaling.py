"""Dynamic loss scaling for float16 (Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2).

Losses are multiplied by a scale before the backward pass, so that small gradients do not round to zero, and gradients
are divided by it before anything else is done with them. Where one overflows, the step is skipped: weights, optimizer
state and count of updates stay as they are. A batch has one scale from its first backward pass to its last; with
batches under way (`fiddlex.train.step.continuous`) that is fixed before it is known whether the batch before it
overflows.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fiddlex.config import OptimizerConfig
from fiddlex.config.sections import MOST_LOSS_SCALE


class Scaling(NamedTuple):
    """The part of a train state that scales losses.

    Attributes:
      scales: float32 [batch], of the next batch and of those after it that may be under way with it.
      good_steps: int32, updates since the scale last changed.
    """

    scales: Any
    good_steps: Any


def start_scaling(config: OptimizerConfig, num_batches: int) -> Scaling:
    """Scaling of a run that begins; `num_batches` may be under way at once."""
    scales = jnp.full(num_batches, config.loss_scale, jnp.float32)
    return Scaling(scales, jnp.int32(0))


def next_scaling(scaling: Scaling, finite: jax.Array, config: OptimizerConfig) -> Scaling:
    """The scaling after a step whose gradients were finite or not.

    After an overflow the scale is at most half of that batch's: batches under way with the same scale may overflow too,
    and do not halve it again. It doubles after `loss_scale_window` updates in a row.
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


def fit(scaling: Scaling, num_batches: int) -> Scaling:
    """The same for another number of batches under way: what is not known yet is as the newest."""
    scales = jnp.pad(scaling.scales, (0, max(num_batches - len(scaling.scales), 0)), mode="edge")
    return scaling._replace(scales=scales[:num_batches])
