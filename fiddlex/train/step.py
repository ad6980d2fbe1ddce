"""The compiled steps: one that trains on a global batch, one that evaluates on it.

Inside `shard_map`, manual over all mesh axes, each replica passes its microbatches through the pipeline and adds up
gradients in float32 (`fiddlex.pipeline.executor`); they are reduced over `data` once, at the end, straight onto the
shards whose master weights they update. The update itself is plain optax on global arrays, outside `shard_map`. The
loss is the mean over the weights of the whole global batch, so the cut into replicas, stages and microbatches changes
no number but by rounding.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fiddlex.config import Config
from fiddlex.models.context import Context, has_flash
from fiddlex.models.dropout import Dropout, example_keys
from fiddlex.models.functional import Weights
from fiddlex.models.gpt import GPT, Batch
from fiddlex.parallel.collectives import as_varying, reduce_gradients
from fiddlex.parallel.sharding import BATCH, MESH_AXES, named
from fiddlex.pipeline import executor as pipeline
from fiddlex.pipeline.executor import execute
from fiddlex.pipeline.lowering import lower
from fiddlex.pipeline.placement import LayerPlacement
from fiddlex.pipeline.ticks import forward_schedule
from fiddlex.train.optimizer import clip_by_global_norm
from fiddlex.train.state import Layout, TrainState

Metrics = dict[str, Any]


def make_train_step(
    model: GPT,
    config: Config,
    optimizer: optax.GradientTransformation,
    *,
    learning_rate: optax.Schedule,
    mesh: Mesh,
    layout: Layout,
    specs: TrainState,
) -> jax.stages.Wrapped:
    """Compiles `(state, batch) -> (state, metrics)`; the state is donated.

    The batch has int32 `tokens` and `targets` and float32 `weights`, each [global batch, sequence], sharded over
    `data`. Metrics are device scalars: `loss` (mean over the batch's tokens, at the weights before the update),
    `grad_norm` (global, before clipping), `learning_rate`, `weights_finite` (after the update), and `nonfinite`, which
    tells for every weight (and layer) whether its gradient has a value that is not finite.
    """
    dtype = jnp.dtype(config.model.dtype)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        weights = compute_weights(state.weights, dtype, mesh, layout)
        loss, grads = gradients(weights, batch, state.step)
        norm = optax.tree.norm(grads)
        clipped = clip_by_global_norm(grads, norm, config.optimizer.clip_norm)
        updates, optimizer_state = optimizer.update(clipped, state.optimizer, state.weights)
        new = TrainState(state.step + 1, optax.apply_updates(state.weights, updates), optimizer_state)
        metrics = {
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": learning_rate(state.step),
            "weights_finite": jnp.all(jnp.asarray([jnp.isfinite(w).all() for w in jax.tree.leaves(new.weights)])),
            "nonfinite": nonfinite(grads, layout.placement),
        }
        return new, metrics

    gradients = make_gradients(model, config, mesh, layout)
    shardings = named(mesh, specs)
    return jax.jit(
        step,
        in_shardings=(shardings, named(mesh, BATCH)),
        out_shardings=(shardings, named(mesh, P())),
        donate_argnums=0,
    )


def make_gradients(
    model: GPT, config: Config, mesh: Mesh, layout: Layout
) -> Callable[[Weights, Batch, jax.Array], tuple[jax.Array, Weights]]:
    """The mean loss of a global batch and its float32 gradients, sharded as the master weights are."""
    partial_axes = frozenset({"data", "tensor"} if config.mesh.sequence_parallel else {"data"})
    lowered, pipeline_model = layout.lowered, _pipeline_model(model, config, mesh, model.loss)

    def local_gradients(weights: Weights, batch: Batch, step: jax.Array) -> tuple[jax.Array, Weights]:
        weights = as_varying(weights, layout.compute, partial_axes)
        scale = 1 / lax.psum(batch["weights"].sum(), "data")
        if config.model.dropout:
            first = lax.axis_index("data") * config.replica_batch_size
            examples = first + jnp.arange(config.replica_batch_size)
            batch = batch | {"keys": example_keys(dropout_key(config.train.seed), step, examples)}
        losses, grads = execute(lowered, layout.placement, pipeline_model, _parts(weights), batch, scale=scale)
        grads = reduce_gradients({**grads.outer, "layers": grads.layers}, layout.compute, layout.master, partial_axes)
        return lax.psum(losses.sum() * scale, "data"), grads

    return jax.shard_map(
        local_gradients,
        mesh=mesh,
        in_specs=(layout.compute, BATCH, P()),
        out_specs=(P(), layout.master),
    )


def make_eval_step(model: GPT, config: Config, *, mesh: Mesh, layout: Layout) -> jax.stages.Wrapped:
    """Compiles `(master weights, batch) -> {loss_sum, weight_sum}` over a global batch, without dropout."""
    lowered = lower(forward_schedule(layout.placement.stage_ranks, config.pipeline.num_microbatches))
    pipeline_model = _pipeline_model(model, config, mesh, model.loss)
    dtype = jnp.dtype(config.model.dtype)

    def local_sums(weights: Weights, batch: Batch) -> Metrics:
        losses, _ = execute(lowered, layout.placement, pipeline_model, _parts(weights), batch)
        return lax.psum({"loss_sum": losses.sum(), "weight_sum": batch["weights"].sum()}, "data")

    mapped = jax.shard_map(local_sums, mesh=mesh, in_specs=(layout.compute, BATCH), out_specs=P())
    return jax.jit(
        lambda weights, batch: mapped(compute_weights(weights, dtype, mesh, layout), batch),
        in_shardings=(named(mesh, layout.master), named(mesh, BATCH)),
    )


def make_logits(model: GPT, config: Config, *, mesh: Mesh, layout: Layout) -> jax.stages.Wrapped:
    """Compiles `(master weights, tokens, positions) -> logits` at one position of each row.

    Tokens are int32 [rows, sequence], the same on all devices; logits are float32 [rows, padded vocabulary], sharded
    over the vocabulary, with the lowest float in the padding.
    """
    lowered = lower(forward_schedule(layout.placement.stage_ranks, num_microbatches=1))
    pipeline_model = _pipeline_model(model, config, mesh, model.next_logits)
    dtype = jnp.dtype(config.model.dtype)

    def next_logits(weights: Weights, tokens_BS: jax.Array, positions_B: jax.Array) -> jax.Array:
        batch = {"tokens": tokens_BS, "positions": positions_B}
        logits_1BV, _ = execute(lowered, layout.placement, pipeline_model, _parts(weights), batch)
        return logits_1BV[0]

    mapped = jax.shard_map(
        next_logits, mesh=mesh, in_specs=(layout.compute, P(), P()), out_specs=P(None, MESH_AXES["vocab"])
    )
    return jax.jit(
        lambda weights, tokens, positions: mapped(compute_weights(weights, dtype, mesh, layout), tokens, positions),
        in_shardings=(named(mesh, layout.master), named(mesh, P()), named(mesh, P())),
    )


def compute_weights(master: Weights, dtype: jnp.dtype, mesh: Mesh, layout: Layout) -> Weights:
    """Master weights rounded to the compute dtype, then gathered over `data`: the wire carries the smaller numbers."""
    cast = jax.tree.map(lambda w: w.astype(dtype), master)
    cast = lax.with_sharding_constraint(cast, named(mesh, layout.master))
    return lax.with_sharding_constraint(cast, named(mesh, layout.compute))


def nonfinite(grads: Weights, placement: LayerPlacement) -> Weights:
    """For every leaf a bool, or one for each layer under `layers`: whether any value is infinite or not a number."""

    def flags(part: str, g: jax.Array) -> jax.Array:
        if part != "layers":
            return jnp.any(~jnp.isfinite(g))
        return jnp.any(~jnp.isfinite(g), axis=tuple(range(1, g.ndim)))[jnp.asarray(placement.rows)]

    return {part: jax.tree.map(functools.partial(flags, part), leaves) for part, leaves in grads.items()}


def _pipeline_model(
    model: GPT, config: Config, mesh: Mesh, head: Callable[[Weights, jax.Array, Batch, Context], jax.Array]
) -> pipeline.Model:
    """The model as the executor takes it; a microbatch with `keys` is run with dropout."""
    flash, recompute = has_flash(config.model, mesh), config.pipeline.recompute

    def context(microbatch: Batch) -> Context:
        dropout = Dropout(config.model.dropout, microbatch["keys"]) if "keys" in microbatch else None
        return Context(config.mesh.sequence_parallel, flash, recompute, dropout)

    return pipeline.Model(
        embed=lambda outer, microbatch: model.embed(outer, microbatch, context(microbatch)),
        layer=lambda layer, x, again: model.apply_layer(layer, x, again[0], context(again[1])),
        head=lambda outer, x, microbatch: head(outer, x, microbatch, context(microbatch)),
        recompute=recompute == "full",
    )


def _parts(weights: Weights) -> pipeline.Weights:
    outer = {name: part for name, part in weights.items() if name != "layers"}
    return pipeline.Weights(outer, weights["layers"])


def init_key(seed: int) -> jax.Array:
    """The key of the initial weights."""
    return jax.random.fold_in(jax.random.key(seed), 0)


def dropout_key(seed: int) -> jax.Array:
    """The key from which every dropout mask of a run descends."""
    return jax.random.fold_in(jax.random.key(seed), 1)
