"""The interface of gradient sources (`flushed`, `unflushed`), and the functions that both share.

The loss is a weighted mean over the whole global batch. Therefore the division into replicas, stages and microbatches
changes the result only by rounding, even if one microbatch or replica has more scored tokens than another.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding

from fiddlex.cluster.jax_settings import key_of
from fiddlex.config import Config
from fiddlex.config.values.recompute import FULL
from fiddlex.errors import ConfigError
from fiddlex.models.cache import LayerCache
from fiddlex.models.collective_matmul import make_exchange
from fiddlex.models.context import Context
from fiddlex.models.dropout import Dropout, example_keys
from fiddlex.models.flash import make_kernel
from fiddlex.models.model import Batch, Model, as_rows
from fiddlex.models.registry import errors_of_family, model_function
from fiddlex.models.weights import Weights
from fiddlex.parallel.collectives import axes_of
from fiddlex.parallel.host_memory import empty, fetched, is_on_host, map_rows
from fiddlex.parallel.sharding import named
from fiddlex.pipeline import engine, layer_losses
from fiddlex.pipeline.carry import PipelineWeights
from fiddlex.pipeline.codec import codec_of
from fiddlex.pipeline.residuals import Arrays
from fiddlex.pipeline.stage import Integer
from fiddlex.train.step.state import SavedState, TrainState, WeightLayout

HeadFunction = Callable[[Weights, jax.Array, Batch, Context], jax.Array]  # a method of a model such as `Model.loss`

# Tile sizes to which arrays are padded in memory (`in_row_major`). By default, XLA lays out the stash for one product
# or collective, and copies the whole stash for the others in each tick.
TILES = {"gpu": (1, 1), "tpu": (8, 128)}


class Update(NamedTuple):
    """A step's update of the master weights."""

    change: Weights  # what the optimizer added to each weight
    grads: Weights  # the gradients that it made this of, after clipping
    kept: jax.Array  # bool scalar: whether the update was made, not skipped


class GradientSource(Protocol):
    """The source of a train step's gradients."""

    state_specs: Any  # PartitionSpecs of `TrainState.pipeline`; shardings where an array is in the memory of the host
    abstract_inputs: Any  # shapes, dtypes and shardings of a step's inputs
    max_batches: int  # number of batches that may be in flight at once

    def start(self, weights: Weights) -> Any:
        """`TrainState.pipeline` at the start of a run with these master weights; for use under `jit`."""

    def gradients(self, state: TrainState, inputs: Any) -> tuple[jax.Array, Weights, Any]:
        """The mean loss of a step's batch, its gradients, and `TrainState.pipeline` for `updated`; for use under `jit`.

        Where layers add losses, the loss is [2]: the whole, and what they add.
        The gradients are float32, sharded like the master weights, and multiplied by the batch's loss scale if it has
        one.
        """

    def num_batches(self, step: int) -> int:
        """The number of batches that step number `step`, counted from 0, takes: its own and later ones."""

    def inputs(self, batches: Sequence[Batch], step: int) -> Any:
        """The inputs of step number `step`, made from its batches in order."""

    def updated(self, state: TrainState, update: Update, inputs: Any) -> Any:
        """`TrainState.pipeline` after the update that led to `state`; for use under `jit`.

        The `pipeline` of `state` is the one that `gradients` returned.
        """

    def saved(self, state: TrainState) -> SavedState:
        """What a checkpoint holds of a train state."""

    def abstract_saved(self, state: TrainState) -> SavedState:
        """Shapes, dtypes and shardings of what `saved` returns, given those of the train state."""

    def resume(self, saved: SavedState) -> Any:
        """`TrainState.pipeline` of a run that resumes from a checkpoint, with no batch in flight.

        Where the checkpoint lacks older weights, the source uses the oldest weights saved, or else the master weights.
        """


@jax.named_scope("compute_weights")
def compute_weights(master: Weights, dtype: jnp.dtype, mesh: Mesh, layout: WeightLayout) -> Weights:
    """Rounds master weights, or parts of them, to the compute dtype, then gathers them over `data`.

    Rounding first sends fewer bytes. Weights of the layers that are in host memory are rounded and gathered row by row,
    and go back there where they come to the devices chunk by chunk.
    """
    sharded, gathered = (
        {part: named(mesh, specs[part]) for part in master} for specs in (layout.master, layout.waiting)
    )

    def made(w: jax.Array, sharded: NamedSharding, gathered: NamedSharding) -> jax.Array:
        rounded = lax.with_sharding_constraint(w.astype(dtype), sharded)
        return lax.with_sharding_constraint(rounded, gathered)

    def of(part: str, w: jax.Array, sharded: NamedSharding, gathered: NamedSharding) -> jax.Array:
        if part != "layers" or not is_on_host(w):
            return made(fetched(w), sharded, gathered)
        if layout.pipeline.stream is None:
            weights = lax.with_sharding_constraint(jnp.zeros(w.shape, dtype), gathered)
        else:
            weights = empty(w.shape, dtype, mesh, gathered.spec)
        rule = lambda _, row, other: (made(row, sharded, gathered), other)  # noqa: E731
        return map_rows(rule, weights, w, (), mesh=mesh)[0]

    return {
        part: jax.tree.map(functools.partial(of, part), leaves, sharded[part], gathered[part])
        for part, leaves in master.items()
    }


def pipeline_model(model: Model, config: Config, mesh: Mesh, head: HeadFunction) -> engine.PipelineModel:
    """Wraps the model for the executor.

    A microbatch with `keys` runs with dropout. One with `slots` and `starts` is new tokens of texts, see `LayerCache`.
    """
    kernel, exchange, recompute = make_kernel(config, mesh), make_exchange(config, mesh), config.pipeline.recomputed
    naming_lines = functools.partial(errors_of_family, config.model.family, model_function(config))

    def context(microbatch: Batch, earlier: Sequence[jax.Array] = ()) -> Context:
        dropout = None
        if "keys" in microbatch:
            dropout = Dropout(config.model.dropout, microbatch["keys"].reshape(-1), redraws="masks" in recompute)
        segments_BS = as_rows(microbatch["segments"]) if "segments" in microbatch else None
        new = "slots" in microbatch
        cache = LayerCache(microbatch["slots"], microbatch["starts"], tuple(earlier)) if new else None
        own = kernel if dropout is None else None  # the kernels drop nothing
        split = config.mesh.sequence_parallel
        return Context(split, own, recompute, dropout, model.causal, segments_BS, exchange, cache)

    def embed(outer: Weights, microbatch: Batch) -> jax.Array:
        with naming_lines():
            x = model.embed(outer, microbatch, context(microbatch))
        tokens_BS = as_rows(microbatch["tokens"])
        length = tokens_BS.shape[1] // (config.mesh.tensor if config.mesh.sequence_parallel else 1)
        expected = jax.ShapeDtypeStruct((len(tokens_BS), length, config.model.hidden_size), config.model.dtype)
        if (found := _type_of(x)) != _type_of(expected):
            raise ConfigError(
                f"model.family={config.model.family}: the embedding makes {found} of {_type_of(tokens_BS)} tokens. It "
                f"must return {_type_of(expected)}, activations of model.hidden_size (docs/models.md)."
            )
        return x

    def scored(outer: Weights, x: jax.Array, microbatch: Batch) -> jax.Array:
        with naming_lines():
            return head(outer, x, microbatch, context(microbatch))

    def apply_layer(layer: Weights, x: jax.Array, number: jax.Array, settings: Context) -> Any:
        with naming_lines():
            result = model.apply_layer(layer, x, number, settings)
        _check_result(result, x, model, config)
        return result

    def layer(layer: Weights, x: jax.Array, again: Any) -> Any:
        number, microbatch = again
        result = apply_layer(layer, x, number, context(microbatch))
        if layer_losses.WEIGHTS not in microbatch:  # in evaluation only the head's loss counts
            return layer_losses.split(result)[0]
        return layer_losses.weighted(result, microbatch[layer_losses.WEIGHTS])

    def cached_layer(layer: Weights, x: jax.Array, again: Any, earlier: Arrays) -> tuple[jax.Array, Arrays]:
        number, microbatch = again
        settings = context(microbatch, earlier)
        y = layer_losses.split(apply_layer(layer, x, number, settings))[0]
        assert settings.cache is not None
        if not settings.cache.new:
            raise ConfigError(
                f"model.family={config.model.family}: its layers attend without Context.cache, so they cannot go on "
                "with a text token by token. Let them call fiddlex.models.attention.attend (docs/models.md)."
            )
        return y, list(settings.cache.new)

    return engine.PipelineModel(
        embed=embed,
        layer=layer,
        head=scored,
        cached_layer=cached_layer,
        recompute=FULL in recompute,
        tile=TILES.get(mesh.devices.flat[0].platform),
        codec=codec_of(config.pipeline.stash_dtype),
    )


def _check_result(result: Any, x: jax.Array, model: Model, config: Config) -> None:
    """Raises ConfigError when a layer returned something else than `Model` asks for; `x` is what it got."""
    y, losses = layer_losses.split(result)
    if _type_of(y) != _type_of(x):
        raise ConfigError(
            f"model.family={config.model.family}: a layer makes {_type_of(y)} of the residual stream, "
            f"{_type_of(x)}. It must return an array of the same shape and dtype (docs/models.md)."
        )
    if [jnp.shape(loss) for loss in losses] != [()] * model.adds_losses:
        raise ConfigError(
            f"model.family={config.model.family}, whose model has adds_losses={model.adds_losses}: a layer returns "
            f"x and {', '.join(map(_type_of, losses)) or 'no loss'}. With adds_losses=True it must return x and "
            "one scalar, else x alone (docs/models.md)."
        )
    if any("tensor" in axes_of(jnp.asarray(loss)) for loss in losses):
        raise ConfigError(
            f"model.family={config.model.family}: each tensor rank has another loss of a layer. Return the same "
            'on all, as lax.pmean(loss, "tensor") gives it (docs/models.md).'
        )


def _type_of(x: Any) -> str:
    """Dtype and shape of an array, as in float32[2, 16]; of something else, its type."""
    return f"{x.dtype}{list(x.shape)}" if isinstance(x, jax.Array | jax.ShapeDtypeStruct) else type(x).__name__


def outer(weights: Weights) -> Weights:
    """The weights outside the layers, embedding and head; or their specs."""
    return {name: part for name, part in weights.items() if name != "layers"}


def parts(weights: Weights) -> PipelineWeights:
    return PipelineWeights(outer(weights), weights["layers"])


def as_mean(batch: Batch) -> tuple[Batch, jax.Array]:
    """A replica's batch, and the factor that turns the sum of its losses into a mean; for use inside `shard_map`.

    Each part of the loss is a mean over the global batch. Of two parts, the weights of the second, one value per
    example, are scaled to the total of the first, so that no array as large as the batch is made. A part whose weights
    are all zero adds nothing to the loss.
    """
    names = [name for name in Model.WEIGHTS.values() if name in batch]
    sums = (lax.psum(batch[name].sum(), "data") for name in names)
    first, *others = (jnp.where(total > 0, total, 1) for total in sums)
    scaled = {name: batch[name] * (first / total) for name, total in zip(names[1:], others, strict=True)}
    return batch | scaled, 1 / first


def with_layer_losses(batch: Batch, *, share: jax.Array, scale: jax.Array | float) -> Batch:
    """A replica's batch, with the weights of its layers' losses; for use inside `shard_map`.

    A layer's loss counts with its mean over the microbatches of the global batch. `share` is the factor of `as_mean`,
    by which the value is still multiplied, and `scale` the loss scale.
    """
    examples = len(batch["tokens"])
    each = 1 / (examples * lax.axis_size("data"))
    weights = jnp.stack([each / share, jnp.asarray(each * scale)])
    return batch | {layer_losses.WEIGHTS: jnp.broadcast_to(weights, (examples, 2))}


def loss_scales(state: TrainState, number: int) -> jax.Array:
    """The loss scale of each batch in flight, float32 [number]; ones where losses are not scaled."""
    return state.scaling.scales[:number] if state.scaling else jnp.ones(number, jnp.float32)


def with_keys(batch: Batch, config: Config, step: Integer) -> Batch:
    """A replica's batch, with a dropout key for each row if the model uses dropout; for use inside `shard_map`."""
    if not config.model.dropout:
        return batch
    shape = batch["tokens"].shape[:-1]
    rows = lax.axis_index("data") * math.prod(shape) + jnp.arange(math.prod(shape))
    return batch | {"keys": example_keys(dropout_key(config.train.seed), step, rows).reshape(shape)}


def init_key(seed: int) -> jax.Array:
    return jax.random.fold_in(key_of(seed), 0)


def dropout_key(seed: int) -> jax.Array:
    """The key from which every dropout mask of a run is derived."""
    return jax.random.fold_in(key_of(seed), 1)
