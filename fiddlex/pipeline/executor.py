"""Runs one batch through an empty pipeline: one scan over the ticks of a lowered schedule, inside `shard_map`.

`engine` defines what a device does in a tick; `continuous` keeps the pipeline running from batch to batch.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fiddlex.pipeline.carry import Carry, PipelineWeights, with_losses
from fiddlex.pipeline.engine import NOTHING_BETWEEN, Between, Engine, PipelineModel
from fiddlex.pipeline.residuals import Arrays
from fiddlex.pipeline.stage import Cache
from fiddlex.pipeline.streamed_weights import run_periods
from fiddlex.schedules.lowering import Lowered
from fiddlex.schedules.pipeline_spec import make_spec
from fiddlex.schedules.placement import LayerPlacement
from fiddlex.schedules.weight_stream import WeightStream

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
    stream: WeightStream | None = None,
    between: Between = NOTHING_BETWEEN,
) -> tuple[jax.Array, PipelineWeights]:
    """Passes all microbatches of a batch through the model; to be called inside `shard_map`.

    Args:
      lowered: the schedule; one of forwards alone gives no gradients.
      placement: the placement by which `weights.layers` are stacked.
      model: the model to run.
      weights: compute weights. Where activations are sharded over an axis and a weight is replicated, the weight must
        be cast to varying (`as_varying`), since gradients are partial sums.
      batch: leaves [example, …]; every microbatch has the same number of consecutive examples. The leaves are sliced in
        this shape: if they were reshaped to [microbatch, example, …] first, XLA would copy the arguments of the step
        for its loop.
      scale: multiplies the gradients.
      fill: what idle slots compute and memory holds at first. No result depends on it: tests fill with NaN.
      stream: when weights come from the host and gradients go there, if `weights.layers` are on the host.
      between: how rows of layers come, and what their gradients pass through before they go.

    Returns:
      The values of the head, [microbatch, …], or what `with_losses` makes of them, and the float32 gradients of `scale`
      times the sum of these values, not yet reduced over devices. With `stream`, the gradients of layers are on the
      host, and reduced.
    """
    settings: dict[str, Any] = {"scales": jnp.asarray(scale)[None], "fill": fill, "between": between}
    if stream is None:
        carry = _run(lowered, placement, model, weights, batch, **settings)
        return with_losses(carry.values, carry.losses), jax.tree.map(lambda g: g[0], carry.grads)
    engine = _engine(lowered, placement, model, weights._replace(layers=()), batch, stream, **settings)
    table = lowered.with_idle(len(stream.loads) * stream.period)
    carry, gradients = run_periods(engine, weights.layers, stream, table)
    return with_losses(carry.values, carry.losses), PipelineWeights(
        jax.tree.map(lambda g: g[0], carry.grads.outer), gradients
    )


def decode(
    lowered: Lowered,
    placement: LayerPlacement,
    model: PipelineModel,
    weights: PipelineWeights,
    batch: Tree,
    cache: Cache,
    *,
    fill: float = 0.0,
) -> tuple[jax.Array, Arrays]:
    """Passes new tokens, leaves [example, …], through a model with a `cached_layer`; see `execute`.

    `lowered` has the forwards of one microbatch. `cache` has what the layers keep of earlier tokens, and arrays for
    what they keep of the new ones. Returns the values of the head, [1, …], and what the layers keep of the new tokens,
    like `cache.new`.
    """
    carry = _run(lowered, placement, model, weights, batch, scales=jnp.ones(1), cache=cache, fill=fill)
    return carry.values, carry.cache


def _run(
    lowered: Lowered,
    placement: LayerPlacement,
    model: PipelineModel,
    weights: PipelineWeights,
    batch: Tree,
    **settings: Any,
) -> Carry:
    """The state of this device after the last tick."""
    engine = _engine(lowered, placement, model, weights, batch, **settings)
    table = jnp.asarray(lowered.table)
    own = lax.dynamic_index_in_dim(table, lax.axis_index("pipe"), axis=1, keepdims=False)
    carry, _ = lax.scan(lambda carry, rows: (engine.tick(carry, *rows), None), engine.start(), (table[:, 0], own))
    return carry


def _engine(
    lowered: Lowered,
    placement: LayerPlacement,
    model: PipelineModel,
    weights: PipelineWeights,
    batch: Tree,
    stream: WeightStream | None = None,
    **settings: Any,
) -> Engine:
    spec = make_spec(lowered, lowered.schedule.num_microbatches, stream=stream)
    with jax.named_scope("compute_weights"):
        versions = jax.tree.map(lambda w: w[None], weights)
    return Engine(spec, placement, model, versions, batch, **settings)
