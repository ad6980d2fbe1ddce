"""Where a train step has its gradients from (`flushed`, `continuous`), and what both ways share.

The loss is the mean over the weights of the whole global batch, so the cut into replicas, stages and microbatches
changes no number but by rounding; nor does it matter that one microbatch or replica has more of what is scored than
another.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from fiddlex.cluster.gpu_targets import runs_flash
from fiddlex.config import Config
from fiddlex.models.context import Context, compute_capability
from fiddlex.models.dropout import Dropout, example_keys
from fiddlex.models.model import Batch, Model, as_rows
from fiddlex.models.weights import Weights
from fiddlex.parallel.sharding import named
from fiddlex.pipeline import engine
from fiddlex.pipeline.stage import Integer
from fiddlex.train.step.state import SavedState, TrainState, WeightLayout

HeadFunction = Callable[[Weights, jax.Array, Batch, Context], jax.Array]  # of a model, as `Model.loss`

# What arrays are padded to in memory (`in_row_major`). Left to itself, XLA gives the stash the order that one product
# or collective wants, and copies it whole for the others in each tick.
TILES = {"gpu": (1, 1), "tpu": (8, 128)}


class GradientSource(Protocol):
    """Where a train step has its gradients from.

    Attributes:
      state_specs: PartitionSpecs of `TrainState.pipeline`.
      abstract_inputs: shapes, dtypes and shardings of what a step is given.
      max_batches: how many may be under way at once.
    """

    state_specs: Any
    abstract_inputs: Any
    max_batches: int

    def start(self, weights: Weights) -> Any:
        """`TrainState.pipeline` of a run that begins with these master weights; for use under `jit`."""

    def gradients(self, state: TrainState, inputs: Any) -> tuple[jax.Array, Weights, Any]:
        """For use under `jit`.

        Returns:
          The mean loss of the step's batch, its float32 gradients, sharded as master weights are and multiplied by
          the batch's loss scale where there is one, and the new `TrainState.pipeline`.
        """

    def num_batches(self, step: int) -> int:
        """How many batches step number `step`, counted from 0, takes: its own and those after it."""

    def inputs(self, batches: Sequence[Batch], step: int) -> Any:
        """What a step is given, of its batches in order."""

    def older(self, state: TrainState) -> dict[str, Weights]:
        """Weights older than the master weights that batches to come are run with, by name, for a checkpoint."""

    def abstract_older(self) -> dict[str, Weights]:
        """Shapes, dtypes and shardings of `older`."""

    def resume(self, saved: SavedState) -> Any:
        """`TrainState.pipeline` of a run that goes on from a checkpoint, with nothing under way.

        In place of older weights that were not saved stand the oldest that were, or else the master weights.
        """


def compute_weights(master: Weights, dtype: jnp.dtype, mesh: Mesh, layout: WeightLayout) -> Weights:
    """Master weights rounded to the compute dtype, then gathered over `data`: the wire carries the smaller numbers."""
    cast = jax.tree.map(lambda w: w.astype(dtype), master)
    cast = lax.with_sharding_constraint(cast, named(mesh, layout.master))
    return lax.with_sharding_constraint(cast, named(mesh, layout.compute))


def pipeline_model(model: Model, config: Config, mesh: Mesh, head: HeadFunction) -> engine.PipelineModel:
    """The model as the executor takes it; a microbatch with `keys` is run with dropout."""
    capability, recompute = compute_capability(mesh), config.pipeline.recompute

    def context(microbatch: Batch) -> Context:
        dropout = Dropout(config.model.dropout, microbatch["keys"].reshape(-1)) if "keys" in microbatch else None
        flash = runs_flash(capability, config.model, dropout=dropout is not None)
        segments_BS = as_rows(microbatch["segments"]) if "segments" in microbatch else None
        return Context(config.mesh.sequence_parallel, flash, recompute, dropout, model.causal, segments_BS)

    return engine.PipelineModel(
        embed=lambda outer, microbatch: model.embed(outer, microbatch, context(microbatch)),
        layer=lambda layer, x, again: model.apply_layer(layer, x, again[0], context(again[1])),
        head=lambda outer, x, microbatch: head(outer, x, microbatch, context(microbatch)),
        recompute=recompute == "full",
        tile=TILES.get(mesh.devices.flat[0].platform),
    )


def parts(weights: Weights) -> engine.Weights:
    """Weights as the executor takes them."""
    outer = {name: part for name, part in weights.items() if name != "layers"}
    return engine.Weights(outer, weights["layers"])


def partial_axes(config: Config) -> frozenset[str]:
    """The axes over which a replicated weight's gradient comes as partial sums."""
    return frozenset({"data", "tensor"} if config.mesh.sequence_parallel else {"data"})


def as_mean(batch: Batch) -> tuple[Batch, jax.Array]:
    """A replica's batch, and what the sum of its losses is multiplied by to be a mean; inside `shard_map`.

    Each part of the loss is a mean over the global batch. Where there are two, one value for each example is brought to
    the same total as the weights of tokens: nothing as large as the batch is made. What weighs nothing at all counts
    nothing.
    """
    names = [name for name in Model.WEIGHTS.values() if name in batch]
    sums = (lax.psum(batch[name].sum(), "data") for name in names)
    first, *others = (jnp.where(total > 0, total, 1) for total in sums)
    scaled = {name: batch[name] * (first / total) for name, total in zip(names[1:], others, strict=True)}
    return batch | scaled, 1 / first


def loss_scales(state: TrainState, number: int) -> jax.Array:
    """The loss scale of each batch under way, float32 [number]; ones where losses are not scaled."""
    return state.scaling.scales if state.scaling else jnp.ones(number, jnp.float32)


def with_keys(batch: Batch, config: Config, step: Integer) -> Batch:
    """A replica's batch of a step with the dropout key of each row, if anything is dropped; inside `shard_map`."""
    if not config.model.dropout:
        return batch
    shape = batch["tokens"].shape[:-1]
    rows = lax.axis_index("data") * math.prod(shape) + jnp.arange(math.prod(shape))
    return batch | {"keys": example_keys(dropout_key(config.train.seed), step, rows).reshape(shape)}


def init_key(seed: int) -> jax.Array:
    """The key of the initial weights."""
    return jax.random.fold_in(jax.random.key(seed), 0)


def dropout_key(seed: int) -> jax.Array:
    """The key from which every dropout mask of a run descends."""
    return jax.random.fold_in(jax.random.key(seed), 1)
