"""The compiled steps: one that trains on a global batch, one that evaluates on it.

Gradients come out of `shard_map` on the shards whose master weights they update, from a pipeline that is flushed
(`fiddlex.train.gradients`) or one that goes on (`fiddlex.train.windowed`). The update itself is plain optax on global
arrays, outside `shard_map`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fiddlex.config import Config
from fiddlex.models.decoder import Decoder
from fiddlex.models.model import Batch, Model
from fiddlex.models.weights import Weights
from fiddlex.parallel.sharding import BATCH, MESH_AXES, named
from fiddlex.pipeline.executor import execute
from fiddlex.pipeline.lowering import lower
from fiddlex.pipeline.placement import LayerPlacement
from fiddlex.pipeline.ticks import forward_schedule
from fiddlex.train.gradients import GradientSource, HeadFunction, compute_weights, parts, pipeline_model
from fiddlex.train.optimizer import clip_by_global_norm, num_updates
from fiddlex.train.scaling import next_scaling
from fiddlex.train.state import Layout, TrainState

Metrics = dict[str, Any]
ScoreFunction = Callable[[Weights, Batch], jax.Array]
LogitsFunction = Callable[[Weights, np.ndarray, np.ndarray], jax.Array]


def make_train_step(
    config: Config,
    optimizer: optax.GradientTransformation,
    source: GradientSource,
    *,
    learning_rate: optax.Schedule,
    mesh: Mesh,
    layout: Layout,
    specs: TrainState,
) -> jax.stages.Wrapped:
    """Compiles `(state, inputs) -> (state, metrics)`; the state is donated.

    The inputs are those of `source`. Metrics are device scalars: `loss` (mean over what the batch has to be scored, at
    the weights its forward pass used), `grad_norm` (global, before clipping), `learning_rate`, `weights_finite` (after
    the update), and `nonfinite`, which tells for every weight (and layer) whether its gradient has a value that is not
    finite; in float16 also `loss_scale`, that of the step's batch, whose update is left out where `grad_norm` is not
    finite.
    """

    def step(state: TrainState, inputs: Any) -> tuple[TrainState, Metrics]:
        loss, grads, pipeline = source.gradients(state, inputs)
        if scales:
            grads = jax.tree.map(lambda g: g / state.scaling.scales[0], grads)
        norm = optax.tree.norm(grads)
        clipped = clip_by_global_norm(grads, norm, config.optimizer.clip_norm)
        updates, optimizer_state = optimizer.update(clipped, state.optimizer, state.weights)
        new = TrainState(state.step + 1, optax.apply_updates(state.weights, updates), optimizer_state, pipeline)
        if scales:
            finite = jnp.isfinite(norm)
            kept, made = ((each.weights, each.optimizer) for each in (state, new))
            weights, optimizer_state = jax.tree.map(lambda a, b: jnp.where(finite, b, a), kept, made)
            scaling = next_scaling(state.scaling, finite, config.optimizer)
            new = new._replace(weights=weights, optimizer=optimizer_state, scaling=scaling)
        metrics = {
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": learning_rate(num_updates(state.optimizer)),
            "weights_finite": jnp.all(jnp.asarray([jnp.isfinite(w).all() for w in jax.tree.leaves(new.weights)])),
            "nonfinite": nonfinite(grads, layout.placement),
        }
        if scales:
            metrics["loss_scale"] = state.scaling.scales[0]
        return new, metrics

    scales, shardings = config.model.dtype == "float16", named(mesh, specs)
    return jax.jit(
        step,
        in_shardings=(shardings, jax.tree.map(lambda x: x.sharding, source.abstract_inputs)),
        out_shardings=(shardings, named(mesh, P())),
        donate_argnums=0,
    )


def make_eval_step(model: Model, config: Config, *, head: HeadFunction, mesh: Mesh, layout: Layout) -> ScoreFunction:
    """Compiles `(master weights, batch) -> values` of a global batch, without dropout.

    `head` is the model's, as `Model.scores`: its values are [example, …] of a microbatch, and of the whole batch
    [example, …].
    """
    lowered = lower(forward_schedule(layout.placement.stage_ranks, config.pipeline.num_microbatches))
    piped = pipeline_model(model, config, mesh, head)
    dtype = jnp.dtype(config.model.dtype)

    def local_values(weights: Weights, batch: Batch) -> jax.Array:
        values, _ = execute(lowered, layout.placement, piped, parts(weights), batch)
        return values.reshape(-1, *values.shape[2:])

    mapped = jax.shard_map(local_values, mesh=mesh, in_specs=(layout.compute, BATCH), out_specs=BATCH)
    compiled = jax.jit(
        lambda weights, batch: mapped(compute_weights(weights, dtype, mesh, layout), batch),
        in_shardings=(named(mesh, layout.master), named(mesh, BATCH)),
        out_shardings=named(mesh, P()),
    )
    return jax.enable_x64(False)(compiled)


def make_logits(model: Decoder, config: Config, *, mesh: Mesh, layout: Layout) -> LogitsFunction:
    """Compiles `(master weights, tokens, positions) -> logits` at one position of each row.

    Tokens are int32 [rows, sequence], the same on all devices; logits are float32 [rows, padded vocabulary], sharded
    over the vocabulary, with the lowest float in the padding.
    """
    lowered = lower(forward_schedule(layout.placement.stage_ranks, num_microbatches=1))
    piped = pipeline_model(model, config, mesh, model.next_logits)
    dtype = jnp.dtype(config.model.dtype)

    def next_logits(weights: Weights, tokens_BS: jax.Array, positions_B: jax.Array) -> jax.Array:
        batch = {"tokens": tokens_BS, "positions": positions_B}
        logits_1BV, _ = execute(lowered, layout.placement, piped, parts(weights), batch)
        return logits_1BV[0]

    mapped = jax.shard_map(
        next_logits, mesh=mesh, in_specs=(layout.compute, P(), P()), out_specs=P(None, MESH_AXES["vocab"])
    )
    compiled = jax.jit(
        lambda weights, tokens, positions: mapped(compute_weights(weights, dtype, mesh, layout), tokens, positions),
        in_shardings=(named(mesh, layout.master), named(mesh, P()), named(mesh, P())),
    )
    return jax.enable_x64(False)(compiled)


def nonfinite(grads: Weights, placement: LayerPlacement) -> Weights:
    """For every leaf a bool, or one for each layer under `layers`: whether any value is infinite or not a number."""

    def flags(part: str, g: jax.Array) -> jax.Array:
        if part != "layers":
            return jnp.any(~jnp.isfinite(g))
        return jnp.any(~jnp.isfinite(g), axis=tuple(range(1, g.ndim)))[jnp.asarray(placement.rows)]

    return {part: jax.tree.map(functools.partial(flags, part), leaves) for part, leaves in grads.items()}
