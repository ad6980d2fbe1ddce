"""The train state: what a step consumes and returns, what a checkpoint holds, and how it lies on the mesh."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fiddlex.config import Config
from fiddlex.errors import ConfigError, ScheduleError
from fiddlex.models.functional import Weights
from fiddlex.models.gpt import GPT
from fiddlex.parallel.sharding import compute_spec, named, zero_spec
from fiddlex.pipeline.generators import make_schedule
from fiddlex.pipeline.lowering import Lowered, lower
from fiddlex.pipeline.placement import LayerPlacement, place_layers
from fiddlex.train.blockwise import Block


class TrainState(NamedTuple):
    """Everything that training changes; also the structure of its specs and abstract shapes.

    Attributes:
      step: int32 scalar, updates done; with the seeds it gives the data position and the dropout stream.
      weights: float32 master weights, sharded as `Layout.master` says.
      optimizer: the optimizer's state, sharded alike.
    """

    step: Any
    weights: Weights
    optimizer: Any


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where every weight lies, and the order of work that asks for it there.

    Attributes:
      lowered: the pipeline's schedule on its ticks.
      placement: of the layers, in the rows of the stacked weights.
      compute: PartitionSpecs, in the structure of the weights, of those that forward and backward use.
      master: PartitionSpecs of master weights and optimizer state (ZeRO-1: over `data` too).
      shapes: ShapeDtypeStructs of the master weights, global shapes.
    """

    lowered: Lowered
    placement: LayerPlacement
    compute: Weights
    master: Weights
    shapes: Weights


def make_layout(model: GPT, config: Config) -> Layout:
    """Makes the schedule, places the layers for it, and applies the sharding table to the model's weights.

    Raises:
      ConfigError: when the schedule does not exist for these sizes, or the layers cannot be cut into its stages.
    """
    pipeline = config.pipeline
    try:
        schedule = make_schedule(
            pipeline.schedule,
            pipe=config.mesh.pipe,
            chunks=pipeline.num_chunks,
            num_microbatches=pipeline.num_microbatches,
            words=("mesh.pipe", "pipeline.num_chunks", "pipeline.num_microbatches"),
        )
    except ScheduleError as error:
        raise ConfigError(
            f"pipeline.schedule={pipeline.schedule} with mesh.pipe={config.mesh.pipe}, pipeline.num_chunks="
            f"{pipeline.num_chunks}, pipeline.num_microbatches={pipeline.num_microbatches}: {error}"
        ) from error
    placement = place_layers(schedule.placement, config.model.num_layers, config.pipeline.layers_per_stage)
    shapes = jax.eval_shape(lambda key: model.init(key, placement.layers), jax.random.key(0))
    compute = jax.tree.map(compute_spec, model.axes(), is_leaf=lambda x: isinstance(x, tuple))
    master = compute
    if config.optimizer.zero1:
        master = jax.tree.map(lambda spec, x: zero_spec(spec, x.shape, config.mesh), compute, shapes)
    return Layout(lower(schedule), placement, compute=compute, master=master, shapes=shapes)


def make_blocks(model: GPT, config: Config, layout: Layout) -> Weights:
    """What the optimizer is told about each weight: decayed or not, stacked by layer or not, how much is padding."""
    padding = config.padded_vocab_size / config.model.vocab_size

    def block(axes: tuple[str | None, ...], x: jax.ShapeDtypeStruct) -> Block:
        stacked = axes[0] == "layers"
        return Block(stacked=stacked, decay=_is_matrix(axes), padding=padding if "vocab" in axes else 1.0)

    return jax.tree.map(block, model.axes(), layout.shapes, is_leaf=lambda x: isinstance(x, tuple))


def state_specs(optimizer: optax.GradientTransformation, layout: Layout) -> TrainState:
    """PartitionSpecs of a whole train state; parts of the optimizer's state that mirror no weight are replicated."""
    optimizer_state = jax.eval_shape(optimizer.init, layout.shapes)
    specs = optax.tree.map_params(
        optimizer,
        lambda x, spec, weight: spec if x.shape == weight.shape else P(),
        optimizer_state,
        layout.master,
        layout.shapes,
        transform_non_params=lambda x: P(),
    )
    return TrainState(step=P(), weights=layout.master, optimizer=specs)


def init_state(
    model: GPT,
    optimizer: optax.GradientTransformation,
    key: jax.Array,
    *,
    mesh: Mesh,
    layout: Layout,
    specs: TrainState,
) -> TrainState:
    """A fresh train state, each device making just the shards it keeps."""
    return jax.jit(_make_init(model, optimizer, layout), out_shardings=named(mesh, specs))(key)


def abstract_state(
    model: GPT, optimizer: optax.GradientTransformation, *, mesh: Mesh, layout: Layout, specs: TrainState
) -> TrainState:
    """Shapes, dtypes and shardings of a train state."""
    shapes = jax.eval_shape(_make_init(model, optimizer, layout), jax.random.key(0))
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes, named(mesh, specs)
    )


def _make_init(
    model: GPT, optimizer: optax.GradientTransformation, layout: Layout
) -> Callable[[jax.Array], TrainState]:
    def init(key: jax.Array) -> TrainState:
        weights = model.init(key, layout.placement.layers)
        return TrainState(step=jnp.zeros((), jnp.int32), weights=weights, optimizer=optimizer.init(weights))

    return init


def _is_matrix(axes: tuple[str | None, ...]) -> bool:
    # Kernels and tables have `hidden` and something else; norms and biases have one of them alone.
    per_layer = axes[1:] if axes[0] == "layers" else axes
    return "hidden" in per_layer and len(per_layer) > 1
