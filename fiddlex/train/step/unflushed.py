"""Training in a pipeline that does not drain between batches.

Each step gets its gradients from one window (`fiddlex.pipeline.continuous`). The train state then has an additional
part, `PipelineState`. `fiddlex.train.step.train_step` makes the update between the windows, so that clipping, loss
scaling and every optimizer work as they do with a flush.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fiddlex.config import Config
from fiddlex.models.model import Batch, Model
from fiddlex.models.weights import Weights
from fiddlex.parallel.collectives import as_varying, reduce_gradients
from fiddlex.parallel.host_memory import host_sharding
from fiddlex.parallel.sharding import named, on_devices
from fiddlex.pipeline.continuous import DeviceWindow, InFlight, empty_pipeline, run_window
from fiddlex.pipeline.engine import Engine
from fiddlex.pipeline.stage import Integer
from fiddlex.train.step.feed import abstract_batch, batch_specs
from fiddlex.train.step.gradients import (
    Update,
    as_mean,
    loss_scales,
    outer,
    parts,
    pipeline_model,
    with_keys,
    with_layer_losses,
)
from fiddlex.train.step.state import SavedState, TrainState, WeightLayout
from fiddlex.train.step.versions import Factors, Versions, VersionStore
from fiddlex.train.step.window_sequence import WindowSequence


class Inputs(NamedTuple):
    """The inputs of a train step."""

    batches: tuple[Batch, ...]  # global batches: the step's own, then later ones that may start before the step ends
    window: DeviceWindow
    factors: Factors | tuple[()]  # of prediction for the weights after the step's update; `()` without prediction


class PipelineState(NamedTuple):
    """The state of the batches in flight, a part of the train state."""

    versions: Versions  # the weights that the batches run with
    in_flight: InFlight  # of each device; leaves have a first dimension over the devices on which they differ


class Unflushed:
    """A `GradientSource` of one window at a time, for a layout whose pipeline has windows."""

    def __init__(
        self,
        model: Model,
        config: Config,
        mesh: Mesh,
        layout: WeightLayout,
        optimizer: optax.GradientTransformation,
    ):
        self._config, self._mesh, self._layout = config, mesh, layout
        self._spec = layout.pipeline.spec
        self.max_batches = self._spec.sizes.batches
        self._batches = (batch_specs(config),) * self.max_batches
        self.sequence = WindowSequence(layout, mesh)
        self._model, self._adds_losses = pipeline_model(model, config, mesh, model.loss), model.adds_losses
        self._store = VersionStore(config, mesh, layout, optimizer)
        self._factors: dict[str, Factors] = {}
        self._in_flight = self._in_flight_specs()
        carry = self._in_flight.carry
        on_host = [host_sharding(mesh, spec) for spec in carry.host_stash]
        state = self._in_flight._replace(carry=carry._replace(host_stash=on_host))
        self.state_specs = PipelineState(self._store.specs, state)
        batch = abstract_batch(config, mesh)
        factors: Any = next(iter(self._store.factors.values()), ())
        everywhere = NamedSharding(mesh, P())
        factors = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), factors)
        self.abstract_inputs = Inputs((batch,) * self.max_batches, self.sequence.abstract(), factors)

    def start(self, weights: Weights) -> PipelineState:
        """The state with nothing in flight, in which all versions are the current weights; for use under `jit`."""
        return self._with_nothing_in_flight(self._store.start(weights))

    def gradients(self, state: TrainState, inputs: Inputs) -> tuple[jax.Array, Weights, PipelineState]:
        mapped = jax.shard_map(
            self._window,
            mesh=self._mesh,
            in_specs=(*self._weight_specs, self._in_flight, self._batches, P(), P(), P()),
            out_specs=(P(), self._layout.master, self._in_flight),
        )
        versions, in_flight = state.pipeline
        scales = loss_scales(state, self.max_batches)
        loss, grads, in_flight = mapped(
            versions.weights, versions.head, in_flight, inputs.batches, inputs.window, state.step, scales
        )
        return loss, grads, PipelineState(versions, in_flight)

    def updated(self, state: TrainState, update: Update, inputs: Inputs) -> PipelineState:
        versions, in_flight = state.pipeline
        return PipelineState(self._store.add(versions, state, update, inputs.factors), in_flight)

    def num_batches(self, step: int) -> int:
        return self.sequence.num_batches(step)

    def inputs(self, batches: Sequence[Batch], step: int) -> Inputs:
        number, used = self.max_batches, self.num_batches(step)
        factors = self._factors_of(self.sequence.semantics(step + 1))  # for the weights after this step's update
        return Inputs((*batches[:used], *[batches[0]] * (number - used)), self.sequence.of(step), factors)

    def _factors_of(self, semantics: str) -> Factors | tuple[()]:
        """The factors of prediction under these semantics, on the devices; put there once."""
        if not self._store.factors:
            return ()
        if semantics not in self._factors:
            self._factors[semantics] = on_devices(self._store.factors[semantics], NamedSharding(self._mesh, P()))
        return self._factors[semantics]

    def saved(self, state: TrainState) -> SavedState:
        versions = state.pipeline.versions
        older = self._saved_versions(versions, state.step)
        return SavedState(
            state.step, state.weights, state.optimizer, older, versions.last_update, state.scaling, state.usual
        )

    def abstract_saved(self, state: TrainState) -> SavedState:
        last_update = state.pipeline.versions.last_update
        return SavedState(state.step, state.weights, state.optimizer, self._store.abstract_saved(), last_update)

    def resume(self, saved: SavedState) -> PipelineState:
        self.sequence.restart(int(saved.step))

        def state(saved: SavedState) -> PipelineState:
            return self._with_nothing_in_flight(self._store.resume(saved))

        made = jax.jit(state, out_shardings=named(self._mesh, self.state_specs))
        pipeline: PipelineState = made(saved._replace(optimizer=(), scaling=(), usual=(), switch=()))
        return pipeline

    @functools.partial(jax.jit, static_argnums=0)
    def _saved_versions(self, versions: Versions, step: jax.Array) -> dict[str, Weights]:
        return self._store.saved(versions, step)

    def _with_nothing_in_flight(self, versions: Versions) -> PipelineState:
        mapped = jax.shard_map(
            lambda weights, head, batches: empty_pipeline(self._engine(weights, head, batches)),
            mesh=self._mesh,
            in_specs=(*self._weight_specs, self._batches),
            out_specs=self._in_flight,
        )
        return PipelineState(versions, mapped(versions.weights, versions.head, (self._no_batch(),) * self.max_batches))

    @property
    def _weight_specs(self) -> tuple[Weights, Weights]:
        return self._store.specs.weights, self._store.specs.head

    def _window(
        self,
        weights: Weights,
        head: Weights,
        in_flight: InFlight,
        batches: tuple[Batch, ...],
        window: DeviceWindow,
        step: jax.Array,
        scales: jax.Array,
    ) -> tuple[jax.Array, Weights, InFlight]:
        engine = self._engine(weights, head, batches, step, scales)
        in_flight, losses, grads = run_window(engine, in_flight, window)
        layout = self._layout
        reduced = reduce_gradients(grads.outer, *map(outer, (layout.compute, layout.master, layout.partial)))
        loss = lax.psum(losses.sum(axis=0) * as_mean(batches[0])[1], "data")
        return loss, {**reduced, "layers": grads.layers}, in_flight

    def _engine(
        self,
        weights: Weights,
        head: Weights,
        batches: tuple[Batch, ...],
        step: Integer = 0,
        scales: jax.Array | float = 1.0,
    ) -> Engine:
        """The engine of a step with the versions' weights, inside `shard_map`."""
        layout, partial = self._layout, self._layout.partial
        axes = partial, {part: partial[part] for part in head}
        weights, head = as_varying((weights, head), self._weight_specs, axes)
        batches, shares = zip(*map(as_mean, batches), strict=True)
        batches = tuple(with_keys(batch, self._config, step + i) for i, batch in enumerate(batches))
        if self._adds_losses:
            each = zip(batches, shares, jnp.broadcast_to(scales, len(batches)), strict=True)
            batches = tuple(with_layer_losses(batch, share=share, scale=scale) for batch, share, scale in each)
        return Engine(
            self._spec,
            layout.placement,
            self._model,
            parts(weights),
            jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *batches),
            scales=jnp.stack(shares) * scales,
            step=step,
            head_versions=head or None,
            between=layout.between(),
        )

    def _in_flight_specs(self) -> InFlight:
        """PartitionSpecs of `InFlight`: for every leaf the mesh axes over which it varies, found by tracing."""
        found: list[InFlight] = []

        def spec(x: jax.Array) -> P:
            axes = tuple(axis for axis in self._mesh.axis_names if axis in jax.typeof(x).manual_axis_type.varying)
            return P(axes or None)

        def probe(weights: Weights, head: Weights, batches: tuple[Batch, ...]) -> tuple[()]:
            found.append(jax.tree.map(spec, empty_pipeline(self._engine(weights, head, batches))))
            return ()

        mapped = jax.shard_map(probe, mesh=self._mesh, in_specs=(*self._weight_specs, self._batches), out_specs=())
        versions, batches = self._store.abstract(), (jax.eval_shape(self._no_batch),) * self.max_batches
        jax.eval_shape(mapped, versions.weights, versions.head, batches)
        return found[0]

    def _no_batch(self) -> Batch:
        shapes = abstract_batch(self._config, self._mesh)
        return {name: jnp.zeros(x.shape, x.dtype) for name, x in shapes.items()}
