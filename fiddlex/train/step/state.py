"""The train state: what a step consumes and returns, which parts a checkpoint holds, and how it is sharded."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fiddlex.cluster.jax_settings import key_of
from fiddlex.config import Config, MeshConfig
from fiddlex.errors import ConfigError
from fiddlex.models.model import Model
from fiddlex.models.spec import Parameter, leaves
from fiddlex.models.weights import Weights
from fiddlex.parallel.axes import REPLICAS
from fiddlex.parallel.collectives import reduce_gradients
from fiddlex.parallel.host_memory import host_sharding
from fiddlex.parallel.sharding import compute_spec, named, zero_spec
from fiddlex.pipeline.engine import Between
from fiddlex.schedules.placement import LayerPlacement
from fiddlex.schedules.resolve import Pipeline, resolve
from fiddlex.train.step.blockwise import Block

T = TypeVar("T")


class TrainState(NamedTuple):
    """Everything that a train step changes; also the structure of its specs and abstract shapes."""

    # int32 scalar, number of steps done, skipped ones too; with the seeds it determines the data position and dropout
    step: Any
    weights: Weights  # float32 master weights, sharded as `WeightLayout.master` says
    optimizer: Any  # the optimizer's state, sharded like the weights that it mirrors, otherwise replicated
    # batches in flight between steps (`fiddlex.train.step.unflushed.PipelineState`); empty if each batch is flushed
    pipeline: Any = ()
    scaling: Any = ()  # loss scaling in float16 (`fiddlex.train.step.scaling.Scaling`); otherwise empty
    usual: Any = ()  # `fiddlex.train.step.spikes.Usual` with `train.spike_bound`; otherwise empty


class SavedState(NamedTuple):
    """A checkpoint: a train state without the state of batches in flight, which a resumed run recomputes."""

    step: Any
    weights: Weights
    optimizer: Any = ()  # empty when only the weights are saved or read
    # by name, in one dtype, the compute weights of later batches that master weights do not give (`VersionStore.saved`)
    older: Mapping[str, Weights] = {}
    last_update: Mapping[str, Any] = {}  # the last update of the weights, where prediction uses it
    scaling: Any = ()
    usual: Any = ()
    switch: Any = ()  # what the run has decided about its semantics (`SyncSwitch.saved`); else empty


@dataclasses.dataclass(frozen=True)
class WeightLayout:
    """The sharding of every weight, in trees of the weights' structure, and the pipeline that determines it."""

    pipeline: Pipeline  # the schedule, the semantics, and the layers of each stage
    compute: Weights  # PartitionSpecs of the weights that forward and backward use
    master: Weights  # PartitionSpecs of master weights and optimizer state (with ZeRO-1, sharded over `data` too)
    # frozensets: the mesh axes over which devices that have the whole weight each compute only a part of its gradient
    partial: Weights
    shapes: Weights  # ShapeDtypeStructs of the master weights, global shapes
    # whether the master weight, with the optimizer's state of its shape, is in the host's memory (`optimizer.offload`)
    on_host: Weights

    @property
    def placement(self) -> LayerPlacement:
        return self.pipeline.placement

    @property
    def waiting(self) -> Weights:
        """PartitionSpecs of the compute weights between their turns."""
        return self.compute

    def between(self) -> Between:
        """What happens to the layers' rows between their turns, inside `shard_map`."""
        specs = (self.compute["layers"], self.master["layers"], self.partial["layers"])
        return Between(lambda grads: reduce_gradients(grads, *specs))

    def master_shardings(self, mesh: Mesh) -> Weights:
        """The sharding of every master weight on a mesh, with the memory that it is in."""
        return jax.tree.map(functools.partial(_sharding, mesh), self.on_host, self.master)


class Init(NamedTuple):
    """Makes a fresh train state in two programs, so that the devices never hold what goes to the host all at once."""

    weights: Callable[[jax.Array], Weights]  # returns the master weights, from a key
    rest: Callable[[Weights], TrainState]  # returns the state with given master weights


def make_layout(model: Model, config: Config) -> WeightLayout:
    """Resolves the pipeline of a config and applies the sharding table to the model's weights."""
    pipeline = resolve(config)
    shapes = jax.eval_shape(lambda key: model.init(key, pipeline.placement.layers), key_of(0))
    compute = jax.tree.map(compute_spec, model.axes(), is_leaf=lambda x: isinstance(x, tuple))
    master = compute
    if config.optimizer.zero1:
        master = {
            part: jax.tree.map(functools.partial(_zero, part, config.mesh), compute[part], shapes[part])
            for part in compute
        }
    offloads = config.optimizer.offload
    on_host = jax.tree.map(lambda parameter: offloads and parameter.decays, model.network.parts)  # matrices and tables
    partial = _partial(model, config)
    return WeightLayout(pipeline, compute=compute, master=master, partial=partial, shapes=shapes, on_host=on_host)


def _sharding(mesh: Mesh, on_host: bool, spec: P) -> NamedSharding:
    return host_sharding(mesh, spec) if on_host else NamedSharding(mesh, spec)


def _partial(model: Model, config: Config) -> Weights:
    """`WeightLayout.partial`: the axes over which activations are sharded where the weight is used."""

    def axes(parameter: Parameter) -> frozenset[str]:
        cut_sequence = ("tensor",) * config.mesh.sequence_parallel
        return frozenset((*REPLICAS, *(cut_sequence if parameter.partial is None else parameter.partial)))

    return jax.tree.map(axes, model.network.parts)


def _zero(part: str, mesh: MeshConfig, spec: P, x: jax.ShapeDtypeStruct) -> P:
    """The ZeRO spec of a weight. ZeRO never shards the layer axis: layer gradients are reduced a chunk at a time."""
    if part != "layers":
        return zero_spec(spec, x.shape, mesh)
    return P(spec[0], *zero_spec(P(*spec[1:]), x.shape[1:], mesh))


def make_blocks(model: Model, config: Config) -> Weights:
    """A `Block` for each weight."""
    if config.optimizer.name == "muon" and not any(each.matrix for each in leaves(model.network.layer)):
        raise ConfigError(
            "optimizer.name=muon: the layers of this network have no matrix, and Muon is a rule for matrices. Use "
            "optimizer.name=adamw, or give the kernels in the description of the family with "
            "fiddlex.models.spec.linear."
        )
    padding = config.padded_vocab_size / config.model.vocab_size

    def block(part: str, parameter: Parameter) -> Block:
        padded = padding if "vocab" in parameter.axes else 1.0
        stacked = part == "layers"
        return Block(stacked, parameter.decays, padded, matrix=parameter.matrix if stacked else None)

    parts = model.network.parts
    return {part: jax.tree.map(functools.partial(block, part), parameters) for part, parameters in parts.items()}


def state_shardings(
    optimizer: optax.GradientTransformation,
    layout: WeightLayout,
    mesh: Mesh,
    *,
    pipeline: Any,
    scaling: Any,
    usual: Any,
) -> TrainState:
    """Shardings of a whole train state; parts of the optimizer's state that mirror no weight are replicated.

    `pipeline` (`GradientSource.state_specs`), `scaling` and `usual` are the PartitionSpecs of the parts of these names.
    """
    everywhere, weights = NamedSharding(mesh, P()), layout.master_shardings(mesh)
    sharded = jax.tree.map(lambda weight, sharding: (weight.shape, sharding), layout.shapes, weights)
    by_path = dict(jax.tree.leaves_with_path(sharded, is_leaf=lambda x: isinstance(x, tuple)))

    def sharding_of(path: jax.tree_util.KeyPath, x: jax.ShapeDtypeStruct) -> NamedSharding:
        shape, sharding = of_weight(path, by_path) or ((), everywhere)
        return sharding if x.shape == shape else everywhere

    of_optimizer = jax.tree.map_with_path(sharding_of, jax.eval_shape(optimizer.init, layout.shapes))
    return TrainState(everywhere, weights, of_optimizer, *named(mesh, (pipeline, scaling, usual)))


def of_weight(path: jax.tree_util.KeyPath, by_path: Mapping[jax.tree_util.KeyPath, T]) -> T | None:
    """What belongs to the weight whose path ends the path of an array of the optimizer's state; None without one."""
    ends = (path[start:] for start in range(len(path)))
    return next((by_path[end] for end in ends if end in by_path), None)


def abstract_state(init: Init, shardings: TrainState) -> TrainState:
    """Shapes, dtypes and shardings of a fresh train state."""
    shapes = jax.eval_shape(lambda key: init.rest(init.weights(key)), key_of(0))
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes, shardings
    )


def make_init(
    model: Model,
    optimizer: optax.GradientTransformation,
    layout: WeightLayout,
    *,
    pipeline: Callable[[Weights], Any],
    scaling: Callable[[], Any],
    usual: Callable[[], Any],
) -> Init:
    """The functions that make a fresh train state; `pipeline`, `scaling` and `usual` make its parts of these names."""

    def rest(weights: Weights) -> TrainState:
        step, moments = jnp.zeros((), jnp.int32), optimizer.init(weights)
        return TrainState(step, weights, moments, pipeline(weights), scaling(), usual())

    return Init(lambda key: model.init(key, layout.placement.layers), rest)
