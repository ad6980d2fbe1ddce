"""Runs a lowered schedule: one scan over the ticks of its table, inside `shard_map` over all mesh axes.

`engine` defines what a device does in a tick. Here one batch passes through an empty pipeline and leaves it empty;
`continuous` keeps the pipeline running from batch to batch.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fiddlex.pipeline.engine import Engine, PipelineModel, PipelineWeights
from fiddlex.schedules.lowering import Lowered
from fiddlex.schedules.pipeline_spec import make_spec
from fiddlex.schedules.placement import LayerPlacement

Tree = Any


def execute(
    lowered: Lowered,
    placement: LayerPlacement,
    model: PipelineModel,
    weights: PipelineWeights,
    batch: Tree,
    *,
    scale: jax.Array | float = 1.0,
    fill: float = 0.0,
) -> tuple[jax.Array, PipelineWeights]:
    """Passes all microbatches of a batch through the model; to be called inside `shard_map`.

    Args:
      lowered: the schedule. A schedule of forwards alone is not differentiated and gives no gradients.
      placement: the placement of the layers, by which `weights.layers` are stacked.
      model: the model to run.
      weights: compute weights. Weights that are replicated over an axis over which activations are sharded must
        be cast to varying (`as_varying`), since gradients are partial sums.
      batch: leaves are [example, …]; every microbatch has the same number of consecutive examples. The leaves are
        sliced in this shape: if they were reshaped to [microbatch, example, …] first, XLA would copy the arguments of
        the step for its loop.
      scale: the factor that multiplies the gradients.
      fill: the value that idle slots compute and that memory holds at first. No result depends on it: tests fill with
        NaN.

    Returns:
      The values of the head, [microbatch, …], and the float32 gradients of `scale` times the sum of these values, not
      yet reduced over devices.
    """
    engine = Engine(
        make_spec(lowered, lowered.schedule.num_microbatches),
        placement,
        model,
        jax.tree.map(lambda w: w[None], weights),
        batch,
        scales=jnp.asarray(scale)[None],
        fill=fill,
    )
    table = jnp.asarray(lowered.table)
    own = lax.dynamic_index_in_dim(table, lax.axis_index("pipe"), axis=1, keepdims=False)
    carry, _ = lax.scan(lambda carry, rows: (engine.tick(carry, *rows), None), engine.start(), (table[:, 0], own))
    return carry.values, jax.tree.map(lambda g: g[0], carry.grads)
