"""Training in a pipeline that does not drain between batches.

Each step gets its gradients from one window (`fiddlex.pipeline.continuous`). It takes its own batch, the later batches
that may start before the step ends, and the window to run. The train state then has an additional part,
`PipelineState`: the weights that batches in flight use, and what is in flight. `fiddlex.train.step.train_step` makes
the update between the windows, so that clipping, loss scaling and every optimizer work as they do with a flush.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fiddlex.config import Config
from fiddlex.models.model import Batch, Model
from fiddlex.models.weights import Weights
from fiddlex.parallel.collectives import as_varying, reduce_gradients
from fiddlex.parallel.sharding import BATCH, named
from fiddlex.pipeline.continuous import DeviceWindow, InFlight, empty_pipeline, run_window
from fiddlex.pipeline.engine import Engine
from fiddlex.pipeline.stage import Integer
from fiddlex.train.step.feed import abstract_batch
from fiddlex.train.step.gradients import (
    as_mean,
    compute_weights,
    loss_scales,
    partial_axes,
    parts,
    pipeline_model,
    with_keys,
)
from fiddlex.train.step.state import SavedState, TrainState, WeightLayout
from fiddlex.train.step.window_sequence import WindowSequence


class Inputs(NamedTuple):
    """The inputs of a train step.

    Attributes:
      batches: global batches, the step's own batch first.
      window: the window to run.
    """

    batches: tuple[Batch, ...]
    window: DeviceWindow


class PipelineState(NamedTuple):
    """The state of the batches in flight, a part of the train state.

    Attributes:
      versions: compute weights, leaves [version, …]; W(k), the weights after k updates, has index k modulo the number
        of versions.
      in_flight: what is in flight on each device; leaves have a first dimension over the devices on which they differ.
    """

    versions: Weights
    in_flight: InFlight


class Unflushed:
    """Computes a model's gradients one window at a time: a `fiddlex.train.step.gradients.GradientSource`.

    Args:
      model: the model.
      config: a validated config.
      mesh: the mesh to run on.
      layout: a layout whose pipeline has windows.
    """

    def __init__(self, model: Model, config: Config, mesh: Mesh, layout: WeightLayout):
        self._config, self._mesh, self._layout = config, mesh, layout
        self._spec = layout.pipeline.spec
        self.max_batches = self._spec.sizes.batches
        self._sequence = WindowSequence(layout, mesh)
        self._model = pipeline_model(model, config, mesh, model.loss)
        self._partial_axes = partial_axes(config)
        versions = jax.tree.map(lambda spec: P(None, *spec), layout.compute, is_leaf=lambda x: isinstance(x, P))
        self._versions = versions
        self.state_specs = PipelineState(versions, self._in_flight_specs())
        batch = abstract_batch(config, mesh)
        self.abstract_inputs = Inputs((batch,) * self.max_batches, self._sequence.abstract())

    def start(self, weights: Weights) -> PipelineState:
        """The state with nothing in flight, in which all versions are the current weights; for use under `jit`."""
        stack = functools.partial(_stacked, size=self._spec.sizes.versions)
        compute = compute_weights(weights, self._dtype, self._mesh, self._layout)
        versions = lax.with_sharding_constraint(jax.tree.map(stack, compute), named(self._mesh, self._versions))
        mapped = jax.shard_map(
            lambda versions, batches: empty_pipeline(self._engine(versions, batches)),
            mesh=self._mesh,
            in_specs=(self._versions, BATCH),
            out_specs=self.state_specs.in_flight,
        )
        return PipelineState(versions, mapped(versions, (self._no_batch(),) * self.max_batches))

    def gradients(self, state: TrainState, inputs: Inputs) -> tuple[jax.Array, Weights, PipelineState]:
        """See `GradientSource`."""
        newest = state.step % self._spec.sizes.versions
        compute = compute_weights(state.weights, self._dtype, self._mesh, self._layout)
        versions = jax.tree.map(
            lambda stack, w: lax.dynamic_update_index_in_dim(stack, w, newest, 0), state.pipeline.versions, compute
        )
        versions = lax.with_sharding_constraint(versions, named(self._mesh, self._versions))
        mapped = jax.shard_map(
            self._window,
            mesh=self._mesh,
            in_specs=(self._versions, self.state_specs.in_flight, BATCH, P(), P(), P()),
            out_specs=(P(), self._layout.master, self.state_specs.in_flight),
        )
        scales = loss_scales(state, self.max_batches)
        loss, grads, in_flight = mapped(
            versions, state.pipeline.in_flight, inputs.batches, inputs.window, state.step, scales
        )
        return loss, grads, PipelineState(versions, in_flight)

    def num_batches(self, step: int) -> int:
        """See `GradientSource`."""
        return self._sequence.num_batches(step)

    def inputs(self, batches: Sequence[Batch], step: int) -> Inputs:
        """See `GradientSource`."""
        number, used = self.max_batches, self.num_batches(step)
        return Inputs((*batches[:used], *[batches[0]] * (number - used)), self._sequence.of(step))

    def older(self, state: TrainState) -> dict[str, Weights]:
        """See `GradientSource`."""
        return self._older(state.pipeline.versions, state.step)

    def abstract_older(self) -> dict[str, Weights]:
        """See `GradientSource`."""
        older = jax.eval_shape(self._older, self._abstract_versions(), jnp.int32(0))
        shardings = named(self._mesh, self._layout.compute)
        return {
            name: jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), weights, shardings)
            for name, weights in older.items()
        }

    def resume(self, saved: SavedState) -> PipelineState:
        """See `GradientSource`."""
        self._sequence.restart(int(saved.step))
        given = [saved.older[name] for name in self._ages() if name in saved.older]

        def state(weights: Weights, step: jax.Array, older: list[Weights]) -> PipelineState:
            fresh = self.start(weights)
            versions = fresh.versions
            for age in range(1, self._spec.sizes.versions) if older else ():
                place = (step - age) % self._spec.sizes.versions
                versions = jax.tree.map(
                    lambda stack, w, place=place: lax.dynamic_update_index_in_dim(
                        stack, w.astype(stack.dtype), place, 0
                    ),
                    versions,
                    older[min(age, len(older)) - 1],
                )
            return fresh._replace(versions=versions)

        made = jax.jit(state, out_shardings=named(self._mesh, self.state_specs))
        pipeline: PipelineState = made(saved.weights, saved.step, given)
        return pipeline

    def _ages(self) -> dict[str, int]:
        """The age in updates of each older version of the weights, by name, the youngest first."""
        return {f"weights_{age}_updates_ago": age for age in range(1, self._spec.sizes.versions)}

    @functools.partial(jax.jit, static_argnums=0)
    def _older(self, versions: Weights, step: jax.Array) -> dict[str, Weights]:
        size = self._spec.sizes.versions
        return {
            name: jax.tree.map(
                lambda stack, age=age: lax.dynamic_index_in_dim(stack, (step - age) % size, keepdims=False), versions
            )
            for name, age in self._ages().items()
        }

    def _window(
        self,
        versions: Weights,
        in_flight: InFlight,
        batches: tuple[Batch, ...],
        window: DeviceWindow,
        step: jax.Array,
        scales: jax.Array,
    ) -> tuple[jax.Array, Weights, InFlight]:
        engine = self._engine(versions, batches, step, scales)
        in_flight, losses, grads = run_window(engine, in_flight, window)
        outer = {name: part for name, part in self._layout.compute.items() if name != "layers"}
        master = {name: self._layout.master[name] for name in outer}
        reduced = reduce_gradients(grads.outer, outer, master, self._partial_axes)
        loss = lax.psum(losses.sum() * as_mean(batches[0])[1], "data")
        return loss, {**reduced, "layers": grads.layers}, in_flight

    def _engine(
        self, versions: Weights, batches: tuple[Batch, ...], step: Integer = 0, scales: jax.Array | float = 1.0
    ) -> Engine:
        """The engine of a step, inside `shard_map`."""
        layout, axes = self._layout, self._partial_axes
        versions = as_varying(versions, self._versions, axes)
        batches, shares = zip(*map(as_mean, batches), strict=True)
        batches = tuple(with_keys(batch, self._config, step + i) for i, batch in enumerate(batches))
        return Engine(
            self._spec,
            layout.placement,
            self._model,
            parts(versions),
            jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *batches),
            scales=jnp.stack(shares) * scales,
            step=step,
            reduce=lambda grads: reduce_gradients(grads, layout.compute["layers"], layout.master["layers"], axes),
        )

    def _in_flight_specs(self) -> InFlight:
        """PartitionSpecs of `InFlight`: for every leaf the mesh axes over which it varies, found by tracing."""
        found: list[InFlight] = []

        def spec(x: jax.Array) -> P:
            axes = tuple(axis for axis in self._mesh.axis_names if axis in jax.typeof(x).manual_axis_type.varying)
            return P(axes or None)

        def probe(versions: Weights, batches: tuple[Batch, ...]) -> tuple[()]:
            found.append(jax.tree.map(spec, empty_pipeline(self._engine(versions, batches))))
            return ()

        mapped = jax.shard_map(probe, mesh=self._mesh, in_specs=(self._versions, BATCH), out_specs=())
        batches = (jax.eval_shape(self._no_batch),) * self.max_batches
        jax.eval_shape(mapped, self._abstract_versions(), batches)
        return found[0]

    def _abstract_versions(self) -> Weights:
        size = self._spec.sizes.versions
        return jax.tree.map(lambda w: jax.ShapeDtypeStruct((size, *w.shape), self._dtype), self._layout.shapes)

    def _no_batch(self) -> Batch:
        shapes = abstract_batch(self._config, self._mesh)
        return {name: jnp.zeros(x.shape, x.dtype) for name, x in shapes.items()}

    @property
    def _dtype(self) -> jnp.dtype:
        return jnp.dtype(self._config.model.dtype)


def _stacked(w: jax.Array, size: int) -> jax.Array:
    return jnp.broadcast_to(w, (size, *w.shape))
