"""The compiled steps: one that trains on a global batch, one that evaluates on it.

Inside `shard_map`, manual over all mesh axes, each replica runs its microbatches one after another and adds up
gradients in float32; they are reduced over `data` once, at the end, straight onto the shards whose master weights they
update. The update itself is plain optax on global arrays, outside `shard_map`. The loss is the mean over the weights of
the whole global batch, so the cut into replicas and microbatches changes no number but by rounding.
"""

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
            "nonfinite": nonfinite(grads),
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
    num_microbatches, size = config.pipeline.num_microbatches, config.microbatch_size
    flash = has_flash(config.model, mesh)

    def local_gradients(weights: Weights, batch: Batch, step: jax.Array) -> tuple[jax.Array, Weights]:
        weights = as_varying(weights, layout.compute, partial_axes)
        total_weight = lax.psum(batch["weights"].sum(), "data")
        first_example = lax.axis_index("data") * config.replica_batch_size

        def accumulate(carry: tuple[jax.Array, Weights], scanned: tuple[jax.Array, Batch]) -> tuple[Any, None]:
            number, microbatch = scanned
            examples = first_example + number * size + jnp.arange(size)
            context = Context(
                config.mesh.sequence_parallel, flash, config.pipeline.recompute, _dropout(config, step, examples)
            )
            loss, grads = jax.value_and_grad(
                lambda weights: _forward(model, weights, microbatch, context) / total_weight
            )(weights)
            loss_sum, grad_sums = carry
            return (
                loss_sum + loss,
                jax.tree.map(lambda total, g: total + g.astype(total.dtype), grad_sums, grads),
            ), None

        zeros = jax.tree.map(lambda w: jnp.zeros_like(w, jnp.float32), weights)
        start = (lax.pcast(jnp.zeros(()), "data", to="varying"), zeros)
        (loss, grads), _ = lax.scan(accumulate, start, (jnp.arange(num_microbatches), _microbatches(config, batch)))
        return lax.psum(loss, "data"), reduce_gradients(grads, layout.compute, layout.master, partial_axes)

    return jax.shard_map(
        local_gradients,
        mesh=mesh,
        in_specs=(layout.compute, BATCH, P()),
        out_specs=(P(), layout.master),
    )


def make_eval_step(model: GPT, config: Config, *, mesh: Mesh, layout: Layout) -> jax.stages.Wrapped:
    """Compiles `(master weights, batch) -> {loss_sum, weight_sum}` over a global batch, without dropout."""
    context = Context(config.mesh.sequence_parallel, has_flash(config.model, mesh))
    dtype = jnp.dtype(config.model.dtype)

    def local_sums(weights: Weights, batch: Batch) -> Metrics:
        # One microbatch after another, as in training: an evaluation needs no more memory than a step.
        losses = lax.map(lambda microbatch: _forward(model, weights, microbatch, context), _microbatches(config, batch))
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
    context = Context(config.mesh.sequence_parallel, has_flash(config.model, mesh))
    dtype = jnp.dtype(config.model.dtype)

    def next_logits(weights: Weights, tokens_BS: jax.Array, positions_B: jax.Array) -> jax.Array:
        x_BTH = _apply_all_layers(model, weights, {"tokens": tokens_BS}, context)
        return model.next_logits(weights, x_BTH, positions_B, context)

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


def nonfinite(grads: Weights) -> Weights:
    """For every leaf a bool, or one for each layer under `layers`: whether any value is infinite or not a number."""
    return {
        part: jax.tree.map(
            lambda g, first=int(part == "layers"): jnp.any(~jnp.isfinite(g), axis=tuple(range(first, g.ndim))), leaves
        )
        for part, leaves in grads.items()
    }


def _microbatches(config: Config, batch: Batch) -> Batch:
    shape = (config.pipeline.num_microbatches, config.microbatch_size)
    return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), batch)


def _dropout(config: Config, step: jax.Array, examples: jax.Array) -> Dropout | None:
    if config.model.dropout == 0:
        return None
    return Dropout(config.model.dropout, example_keys(dropout_key(config.train.seed), step, examples))


def _forward(model: GPT, weights: Weights, batch: Batch, context: Context) -> jax.Array:
    return model.loss(weights, _apply_all_layers(model, weights, batch, context), batch, context)


def _apply_all_layers(model: GPT, weights: Weights, batch: Batch, context: Context) -> jax.Array:
    x_BTH = model.embed(weights, batch, context)
    x_BTH = model.apply_layers(weights["layers"], lax.pcast(x_BTH, "pipe", to="varying"), 0, context)
    return lax.psum(x_BTH, "pipe")


def init_key(seed: int) -> jax.Array:
    """The key of the initial weights."""
    return jax.random.fold_in(jax.random.key(seed), 0)


def dropout_key(seed: int) -> jax.Array:
    """The key from which every dropout mask of a run descends."""
    return jax.random.fold_in(jax.random.key(seed), 1)
