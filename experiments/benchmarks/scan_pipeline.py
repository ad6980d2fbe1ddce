"""The usual pipeline in JAX, for comparison with fiddlex's: a scan over ticks, differentiated by `jax.grad`.

Each of the m + p − 1 ticks runs the stage of every device, busy or not, and passes its output on by `ppermute`;
autodiff reverses the scan. The layers, the embedding, the loss and the split of the vocabulary over `pipe` are
fiddlex's own, so that the two programs differ only in the pipeline. One choice favours this pipeline: it computes the
loss tick by tick and recomputes the logits in the backward pass, since saved logits would take the most memory of all.
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
from fiddlex.models.context import Context
from fiddlex.models.model import Batch, Model
from fiddlex.models.weights import Weights
from fiddlex.parallel.sharding import named
from fiddlex.train.step.program import Program
from fiddlex.train.step.state import TrainState, WeightLayout

Tree = Any


def make_scan_gradients(
    model: Model, config: Config, mesh: Mesh, layout: WeightLayout, *, checkpoint_stage: bool
) -> Callable[[Weights, Batch], tuple[jax.Array, Weights]]:
    """Makes the function that returns the mean loss of a batch and its gradients; the mesh has a `pipe` axis alone.

    Args:
      model: the model, with weights stacked as in `layout`; each rank has one chunk.
      config: the sizes; without dropout.
      mesh: a mesh with data = tensor = 1.
      layout: the weight layout of a schedule with even stages in the order of the ranks.
      checkpoint_stage: whether to save only the inputs of stages (`jax.checkpoint` around the stage).
    """
    context, num_microbatches = Context(sequence_parallel=False), config.pipeline.num_microbatches
    num_ranks = config.mesh.pipe
    layers_per_stage = config.model.num_layers // num_ranks

    def stage(layers: Tree, x_BSH: jax.Array) -> jax.Array:
        first = lax.axis_index("pipe") * layers_per_stage
        numbers = first + jnp.arange(layers_per_stage)
        body = lambda x, row: (model.apply_layer(row[0], x, row[1], context), None)  # noqa: E731
        return lax.scan(body, x_BSH, (layers, numbers))[0]

    if checkpoint_stage:
        stage = jax.checkpoint(stage, prevent_cse=False)

    @jax.checkpoint
    def score(outer: Tree, y_BSH: jax.Array, microbatch: Batch) -> jax.Array:
        is_last = lax.axis_index("pipe") == num_ranks - 1
        return model.loss(outer, lax.psum(jnp.where(is_last, y_BSH, 0), "pipe"), microbatch, context)

    def total(weights: Weights, batch: Batch) -> jax.Array:
        outer = {name: part for name, part in weights.items() if name != "layers"}
        ring = [(rank, (rank + 1) % num_ranks) for rank in range(num_ranks)]

        def microbatch(number: jax.Array) -> Batch:
            number = jnp.clip(number, 0, num_microbatches - 1)
            return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, number, keepdims=False), batch)

        def tick(arrived_BSH: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
            embedded = lax.pcast(model.embed(outer, microbatch(number), context), "pipe", to="varying")
            y_BSH = stage(weights["layers"], jnp.where(lax.axis_index("pipe") == 0, embedded, arrived_BSH))
            leaving = number - (num_ranks - 1)
            loss = jnp.where(leaving >= 0, score(outer, y_BSH, microbatch(leaving)), 0.0)
            return lax.ppermute(y_BSH, "pipe", ring), loss

        like = jnp.zeros_like(jax.eval_shape(lambda: model.embed(outer, microbatch(jnp.int32(0)), context)))
        ticks = jnp.arange(num_microbatches + num_ranks - 1)
        _, losses = lax.scan(tick, lax.pcast(like, "pipe", to="varying"), ticks)
        return losses.sum()

    def local_gradients(weights: Weights, batch: Batch) -> tuple[jax.Array, Weights]:
        scale = 1 / batch["weights"].sum()
        shape = (num_microbatches, config.microbatch_size)
        microbatches = jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), batch)
        return jax.value_and_grad(lambda weights: total(weights, microbatches) * scale)(weights)

    return jax.shard_map(local_gradients, mesh=mesh, in_specs=(layout.compute, P()), out_specs=(P(), layout.compute))


def make_scan_step(program: Program, *, checkpoint_stage: bool) -> jax.stages.Wrapped:
    """Jits `(state, batch) -> (state, loss)` for the inputs of `program`, with gradients from `make_scan_gradients`."""
    optimizer, shardings = program.optimizer, program.shardings
    gradients = make_scan_gradients(
        program.model, program.config, program.mesh, program.layout, checkpoint_stage=checkpoint_stage
    )

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array]:
        loss, grads = gradients(state.weights, batch)
        updates, optimizer_state = optimizer.update(grads, state.optimizer, state.weights)
        return TrainState(state.step + 1, optax.apply_updates(state.weights, updates), optimizer_state), loss

    return jax.jit(
        step,
        in_shardings=(shardings, named(program.mesh, P())),
        out_shardings=(shardings, named(program.mesh, P())),
        donate_argnums=0,
    )
