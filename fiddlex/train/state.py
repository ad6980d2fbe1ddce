"""The train state: what a step consumes and returns, what a checkpoint holds, and how it lies on the mesh."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fiddlex.config import Config, MeshConfig
from fiddlex.errors import ConfigError, ScheduleError
from fiddlex.models.model import Model
from fiddlex.models.spec import Parameter
from fiddlex.models.weights import Weights
from fiddlex.parallel.sharding import compute_spec, named, zero_spec
from fiddlex.pipeline.generators import make_schedule
from fiddlex.pipeline.lowering import Lowered, lower
from fiddlex.pipeline.placement import LayerPlacement, place_layers
from fiddlex.pipeline.schedule import Schedule
from fiddlex.pipeline.semantics import Phase, make_phases, make_semantics
from fiddlex.pipeline.windows import Windows, unroll
from fiddlex.train.blockwise import Block


class TrainState(NamedTuple):
    """Everything that training changes; also the structure of its specs and abstract shapes.

    Attributes:
      step: int32 scalar, updates done; with the seeds it gives the data position and the dropout stream.
      weights: float32 master weights, sharded as `Layout.master` says.
      optimizer: the optimizer's state, sharded alike.
      ahead: what batches under way have here (`fiddlex.train.windowed.Ahead`); empty with a flush after each batch.
      scaling: of the loss in float16 (`fiddlex.train.scaling.Scaling`); else empty.
    """

    step: Any
    weights: Weights
    optimizer: Any
    ahead: Any = ()
    scaling: Any = ()


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where every weight lies, and the order of work that asks for it there.

    Attributes:
      lowered: the pipeline's schedule of one batch on its ticks.
      phases: the semantics of the run's steps.
      windows: for every semantics among them the schedule that goes on from batch to batch; empty when all are sync.
      placement: of the layers, in the rows of the stacked weights.
      compute: PartitionSpecs, in the structure of the weights, of those that forward and backward use.
      master: PartitionSpecs of master weights and optimizer state (ZeRO-1: over `data` too).
      shapes: ShapeDtypeStructs of the master weights, global shapes.
    """

    lowered: Lowered
    phases: tuple[Phase, ...]
    windows: Mapping[str, Windows]
    placement: LayerPlacement
    compute: Weights
    master: Weights
    shapes: Weights


def make_layout(model: Model, config: Config) -> Layout:
    """Makes the schedule, places the layers for it, and applies the sharding table to the model's weights.

    Raises:
      ConfigError: when the schedule does not exist for these sizes, or the layers cannot be cut into its stages.
    """
    pipeline = config.pipeline
    make = functools.partial(
        make_schedule,
        pipeline.schedule,
        pipe=config.mesh.pipe,
        chunks=pipeline.num_chunks,
        words=("mesh.pipe", "pipeline.num_chunks", "pipeline.num_microbatches"),
    )
    try:
        schedule = make(num_microbatches=pipeline.num_microbatches)
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
        master = {
            part: jax.tree.map(functools.partial(_zero, part, config.mesh), compute[part], shapes[part])
            for part in compute
        }
    phases = make_phases(pipeline.semantics, pipeline.semantics_schedule, config.train.num_steps)
    windows = _make_windows(config, schedule, make, phases)
    return Layout(lower(schedule), phases, windows, placement, compute=compute, master=master, shapes=shapes)


def _zero(part: str, mesh: MeshConfig, spec: P, x: jax.ShapeDtypeStruct) -> P:
    """Gradients of layers are reduced a chunk at a time, so their rows are not cut."""
    if part != "layers":
        return zero_spec(spec, x.shape, mesh)
    return P(spec[0], *zero_spec(P(*spec[1:]), x.shape[1:], mesh))


def _make_windows(
    config: Config, schedule: Schedule, make: Callable[..., Schedule], phases: Sequence[Phase]
) -> dict[str, Windows]:
    """The windows of every semantics of the run, unless each batch is flushed.

    Raises:
      ConfigError: when the semantics cannot be had with this schedule.
    """
    windows, pipeline = {}, config.pipeline
    names = dict.fromkeys(phase.semantics for phase in phases)
    make_one = functools.partial(make_semantics, num_stages=schedule.num_stages, batch_size=pipeline.num_microbatches)
    all_semantics = {name: make_one(name) for name in names}
    if not any(max(semantics.delays) for semantics in all_semantics.values()):
        return {}
    for name, semantics in all_semantics.items():
        if name == "2bw" and pipeline.num_microbatches < config.mesh.pipe:
            raise ConfigError(
                f"2bw with pipeline.num_microbatches={pipeline.num_microbatches} and mesh.pipe={config.mesh.pipe}: it "
                f"needs at least as many microbatches as ranks. Use pipeline.num_microbatches={config.mesh.pipe} or "
                "more, or sync; delay:1 has the same weights and runs with so few, mostly waiting. How many run "
                "without waiting depends on the schedule: experiments/schedule.py --semantics=2bw tells."
            )
        longer = None if pipeline.schedule.startswith("file:") else lambda number: make(num_microbatches=number)
        try:
            windows[name] = unroll(schedule, semantics, longer)
        except ScheduleError as error:
            raise ConfigError(
                f"pipeline.semantics={name} with pipeline.schedule={pipeline.schedule}: {error}"
            ) from error
    return windows


def make_blocks(model: Model, config: Config) -> Weights:
    """What the optimizer is told about each weight: decayed or not, stacked by layer or not, how much is padding."""
    padding = config.padded_vocab_size / config.model.vocab_size

    def block(part: str, parameter: Parameter) -> Block:
        padded = padding if "vocab" in parameter.axes else 1.0
        return Block(stacked=part == "layers", decay=parameter.decays, padding=padded)

    parts = model.network.parts
    return {part: jax.tree.map(functools.partial(block, part), parameters) for part, parameters in parts.items()}


def state_specs(optimizer: optax.GradientTransformation, layout: Layout, *, ahead: Any, scaling: Any) -> TrainState:
    """PartitionSpecs of a whole train state; parts of the optimizer's state that mirror no weight are replicated.

    Args:
      optimizer: of the state.
      layout: of its weights.
      ahead: specs of the part of that name.
      scaling: likewise.
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
    return TrainState(step=P(), weights=layout.master, optimizer=specs, ahead=ahead, scaling=scaling)


def abstract_state(init: Callable[[jax.Array], TrainState], *, mesh: Mesh, specs: TrainState) -> TrainState:
    """Shapes, dtypes and shardings of a train state that `init` makes of a key."""
    shapes = jax.eval_shape(init, jax.random.key(0))
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes, named(mesh, specs)
    )


def make_init(
    model: Model,
    optimizer: optax.GradientTransformation,
    layout: Layout,
    *,
    ahead: Callable[[Weights], Any],
    scaling: Callable[[], Any],
) -> Callable[[jax.Array], TrainState]:
    """The function that makes a fresh train state of a key; `ahead` and `scaling` make its parts of those names."""

    def init(key: jax.Array) -> TrainState:
        weights = model.init(key, layout.placement.layers)
        return TrainState(jnp.zeros((), jnp.int32), weights, optimizer.init(weights), ahead(weights), scaling())

    return init
