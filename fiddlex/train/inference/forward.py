"""The compiled forward pass that returns the values of a head for examples."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fiddlex.cluster.jax_settings import fixed_settings
from fiddlex.cluster.together import compiled_by_all
from fiddlex.config import Config
from fiddlex.models.model import Batch, Model
from fiddlex.models.weights import Weights
from fiddlex.parallel.sharding import BATCH, named
from fiddlex.pipeline.executor import execute
from fiddlex.schedules.lowering import lower
from fiddlex.schedules.ticks import forward_schedule
from fiddlex.schedules.weight_stream import stream_weights
from fiddlex.train.step.feed import batch_specs
from fiddlex.train.step.gradients import HeadFunction, compute_weights, parts, pipeline_model
from fiddlex.train.step.state import WeightLayout

ScoreFunction = Callable[[Weights, Batch], jax.Array]


def make_eval_step(
    model: Model, config: Config, *, head: HeadFunction, mesh: Mesh, layout: WeightLayout
) -> ScoreFunction:
    """Compiles `(master weights, global batch) -> values [example, …]`, without dropout.

    `head`, a method of the model such as `Model.scores`, returns the values of a microbatch's examples.
    """
    streams, placement = config.pipeline.by_chunk, layout.placement
    schedule = forward_schedule(placement.stage_ranks, config.pipeline.num_microbatches, chunk_major=streams)
    lowered = lower(schedule)
    stream = stream_weights(lowered, rows_per_chunk=placement.rows_per_chunk) if streams else None
    piped = pipeline_model(model, config, mesh, head)
    dtype = jnp.dtype(config.model.dtype)

    def local_values(weights: Weights, batch: Batch) -> jax.Array:
        values, _ = execute(lowered, placement, piped, parts(weights), batch, stream=stream, between=layout.between())
        return values.reshape(-1, *values.shape[2:])

    specs = batch_specs(config)
    mapped = jax.shard_map(local_values, mesh=mesh, in_specs=(layout.waiting, specs), out_specs=BATCH)
    compiled = jax.jit(
        lambda weights, batch: mapped(compute_weights(weights, dtype, mesh, layout), batch),
        in_shardings=(layout.master_shardings(mesh), named(mesh, specs)),
        out_shardings=named(mesh, P()),
    )
    return fixed_settings()(compiled_by_all(compiled, "the first batch to score"))
