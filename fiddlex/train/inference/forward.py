"""The compiled forward passes: one returns a head's values for examples, the other next-token logits."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fiddlex.config import Config
from fiddlex.models.decoder import Decoder
from fiddlex.models.model import Batch, Model
from fiddlex.models.weights import Weights
from fiddlex.parallel.sharding import BATCH, MESH_AXES, named
from fiddlex.pipeline.executor import execute
from fiddlex.schedules.lowering import lower
from fiddlex.schedules.ticks import forward_schedule
from fiddlex.train.step.gradients import HeadFunction, compute_weights, parts, pipeline_model
from fiddlex.train.step.state import WeightLayout

ScoreFunction = Callable[[Weights, Batch], jax.Array]
LogitsFunction = Callable[[Weights, np.ndarray, np.ndarray], jax.Array]


def make_eval_step(
    model: Model, config: Config, *, head: HeadFunction, mesh: Mesh, layout: WeightLayout
) -> ScoreFunction:
    """Compiles `(master weights, batch) -> values` for a global batch, without dropout.

    `head` is a method of the model such as `Model.scores`. It returns values [example, …] for a microbatch; the
    compiled function returns values [example, …] for the whole batch.
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


def make_logits(model: Decoder, config: Config, *, mesh: Mesh, layout: WeightLayout) -> LogitsFunction:
    """Compiles `(master weights, tokens, positions) -> logits` at one position of each row.

    Tokens are int32 [rows, sequence], replicated on all devices. Logits are float32 [rows, padded vocabulary], sharded
    over the vocabulary; the padding holds the lowest float.
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
