"""The train state: what a step consumes and returns, what a checkpoint holds of it, and how it lies on the mesh."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fiddlex.config import Config, MeshConfig
from fiddlex.models.model import Model
from fiddlex.models.spec import Parameter
from fiddlex.models.weights import Weights
from fiddlex.parallel.sharding import compute_spec, named, zero_spec
from fiddlex.schedules.placement import LayerPlacement
from fiddlex.schedules.resolve import Pipeline, resolve
from fiddlex.train.step.blockwise import Block


class TrainState(NamedTuple):
    """Everything that a train step changes; also the structure of its specs and abstract shapes.

    Attributes:
      step: int32 scalar, updates done; with the seeds it gives the data position and the dropout stream.
      weights: float32 master weights, sharded as `WeightLayout.master` says.
      optimizer: the optimizer's state, sharded alike.
      pipeline: what batches under way keep between steps (`fiddlex.train.step.continuous.PipelineState`); empty where
        each batch is flushed.
      scaling: of the loss in float16 (`fiddlex.train.step.scaling.Scaling`); else empty.
    """

    step: Any
    weights: Weights
    optimizer: Any
    pipeline: Any = ()
    scaling: Any = ()


class SavedState(NamedTuple):
    """What a checkpoint holds: a train state without what batches under way keep, which is computed again.

    Attributes:
      step: as in `TrainState`.
      weights: as in `TrainState`.
      optimizer: as in `TrainState`; empty where weights alone are saved or read.
      older: by name, weights older than the master weights with which batches to come are run, all in one dtype
        (`GradientSource.older`).
      scaling: as in `TrainState`.
    """

    step: Any
    weights: Weights
    optimizer: Any = ()
    older: Mapping[str, Weights] = {}
    scaling: Any = ()


@dataclasses.dataclass(frozen=True)
class WeightLayout:
    """Where every weight lies, and the pipeline that asks for it there.

    Attributes:
      pipeline: schedule, semantics, and the layers of each stage.
      compute: PartitionSpecs, in the structure of the weights, of those that forward and backward use.
      master: PartitionSpecs of master weights and optimizer state (ZeRO-1: over `data` too).
      shapes: ShapeDtypeStructs of the master weights, global shapes.
    """

    pipeline: Pipeline
    compute: Weights
    master: Weights
    shapes: Weights

    @property
    def placement(self) -> LayerPlacement:
        """The layers of each stage, and the rows of the stacked weights in which they lie."""
        return self.pipeline.placement


def make_layout(model: Model, config: Config) -> WeightLayout:
    """Resolves the pipeline of a config and applies the sharding table to the model's weights.

    Raises:
      ConfigError: as `resolve`.
    """
    pipeline = resolve(config)
    shapes = jax.eval_shape(lambda key: model.init(key, pipeline.placement.layers), jax.random.key(0))
    compute = jax.tree.map(compute_spec, model.axes(), is_leaf=lambda x: isinstance(x, tuple))
    master = compute
    if config.optimizer.zero1:
        master = {
            part: jax.tree.map(functools.partial(_zero, part, config.mesh), compute[part], shapes[part])
            for part in compute
        }
    return WeightLayout(pipeline, compute=compute, master=master, shapes=shapes)


def _zero(part: str, mesh: MeshConfig, spec: P, x: jax.ShapeDtypeStruct) -> P:
    """Gradients of layers are reduced a chunk at a time, so their rows are not cut."""
    if part != "layers":
        return zero_spec(spec, x.shape, mesh)
    return P(spec[0], *zero_spec(P(*spec[1:]), x.shape[1:], mesh))


def make_blocks(model: Model, config: Config) -> Weights:
    """What the optimizer is told about each weight: decayed or not, stacked by layer or not, how much is padding."""
    padding = config.padded_vocab_size / config.model.vocab_size

    def block(part: str, parameter: Parameter) -> Block:
        padded = padding if "vocab" in parameter.axes else 1.0
        return Block(stacked=part == "layers", decay=parameter.decays, padding=padded)

    parts = model.network.parts
    return {part: jax.tree.map(functools.partial(block, part), parameters) for part, parameters in parts.items()}


def state_specs(
    optimizer: optax.GradientTransformation, layout: WeightLayout, *, pipeline: Any, scaling: Any
) -> TrainState:
    """PartitionSpecs of a whole train state; parts of the optimizer's state that mirror no weight are replicated.

    Args:
      optimizer: of the state.
      layout: of its weights.
      pipeline: specs of the part of that name.
      scaling: specs of the part of that name.
    """
    optimizer_state = jax.eval_shape(optimizer.init, layout.shapes)
    specs = optax.tree.map_params(
        optimizer,
        lambda x, spec, weight: spec if x.shape == weight.shape else P(),
        optimizer_state,
        layout.master,
        layout.shapes,
        transform_non_params=lambda x: P(),
    )
    return TrainState(step=P(), weights=layout.master, optimizer=specs, pipeline=pipeline, scaling=scaling)


def abstract_state(init: Callable[[jax.Array], TrainState], *, mesh: Mesh, specs: TrainState) -> TrainState:
    """Shapes, dtypes and shardings of a train state that `init` makes of a key."""
    shapes = jax.eval_shape(init, jax.random.key(0))
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes, named(mesh, specs)
    )


def make_init(
    model: Model,
    optimizer: optax.GradientTransformation,
    layout: WeightLayout,
    *,
    pipeline: Callable[[Weights], Any],
    scaling: Callable[[], Any],
) -> Callable[[jax.Array], TrainState]:
    """The function that makes a fresh train state of a key; `pipeline` and `scaling` make its parts of those names."""

    def init(key: jax.Array) -> TrainState:
        weights = model.init(key, layout.placement.layers)
        return TrainState(jnp.zeros((), jnp.int32), weights, optimizer.init(weights), pipeline(weights), scaling())

    return init
