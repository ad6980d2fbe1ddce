"""Gradients of one global batch, in a pipeline that starts and ends empty.

Inside `shard_map`, manual over all mesh axes, each replica accumulates the gradients of its microbatches in float32
(`fiddlex.pipeline.executor`). At the end, one reduction over `data` puts them directly on the shards whose master
weights they update. Where gradients go to the host, each chunk's are reduced before they go.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fiddlex.config import Config
from fiddlex.models.model import Batch, Model
from fiddlex.models.weights import Weights
from fiddlex.parallel.collectives import as_varying, reduce_gradients
from fiddlex.pipeline.executor import execute
from fiddlex.train.step.feed import abstract_batch, batch_specs
from fiddlex.train.step.gradients import (
    Update,
    as_mean,
    compute_weights,
    loss_scales,
    outer,
    parts,
    pipeline_model,
    with_keys,
    with_layer_losses,
)
from fiddlex.train.step.state import SavedState, TrainState, WeightLayout


class Flushed:
    """A `GradientSource` of one batch at a time, in a pipeline that starts and ends empty."""

    def __init__(
        self,
        model: Model,
        config: Config,
        mesh: Mesh,
        layout: WeightLayout,
        optimizer: optax.GradientTransformation,
    ):
        del optimizer
        self.state_specs, self.max_batches = (), 1
        self.abstract_inputs = abstract_batch(config, mesh)
        self._gradients = make_gradients(model, config, mesh, layout)
        self._compute_weights = functools.partial(
            compute_weights, dtype=jnp.dtype(config.model.dtype), mesh=mesh, layout=layout
        )

    def start(self, weights: Weights) -> Any:
        del weights
        return ()

    def gradients(self, state: TrainState, inputs: Any) -> tuple[jax.Array, Weights, Any]:
        weights, scale = self._compute_weights(state.weights), loss_scales(state, 1)[0]
        return *self._gradients(weights, inputs, state.step, scale), ()

    def num_batches(self, step: int) -> int:
        del step
        return 1

    def inputs(self, batches: Sequence[Batch], step: int) -> Any:
        del step
        return batches[0]

    def updated(self, state: TrainState, update: Update, inputs: Any) -> Any:
        del state, update, inputs
        return ()

    def saved(self, state: TrainState) -> SavedState:
        return SavedState(state.step, state.weights, state.optimizer, scaling=state.scaling, usual=state.usual)

    def abstract_saved(self, state: TrainState) -> SavedState:
        return SavedState(state.step, state.weights, state.optimizer)

    def resume(self, saved: SavedState) -> Any:
        del saved
        return ()


def make_gradients(
    model: Model, config: Config, mesh: Mesh, layout: WeightLayout
) -> Callable[[Weights, Batch, jax.Array, jax.Array], tuple[jax.Array, Weights]]:
    """Makes `(compute weights, batch, step, loss scale) -> (mean loss, scaled gradients)`; see `GradientSource`."""
    axes, lowered, stream = layout.partial, layout.pipeline.lowered, layout.pipeline.stream
    piped = pipeline_model(model, config, mesh, model.loss)

    def local_gradients(weights: Weights, batch: Batch, step: jax.Array, scale: jax.Array) -> tuple[jax.Array, Weights]:
        weights, (batch, share) = as_varying(weights, layout.waiting, axes), as_mean(batch)
        batch = with_keys(batch, config, step)
        if model.adds_losses:
            batch = with_layer_losses(batch, share=share, scale=scale)
        between = layout.between()
        losses, grads = execute(
            lowered, layout.placement, piped, parts(weights), batch, scale=share * scale, stream=stream, between=between
        )
        layers = grads.layers if stream else between.reduce(grads.layers)
        reduced = reduce_gradients(grads.outer, *map(outer, (layout.compute, layout.master, axes)))
        return lax.psum(losses.sum(axis=0) * share, "data"), {**reduced, "layers": layers}

    return jax.shard_map(
        local_gradients,
        mesh=mesh,
        in_specs=(layout.waiting, batch_specs(config), P(), P()),
        out_specs=(P(), layout.master),
    )
