"""The weight versions that delayed batches run with: made when the weights change, stacked, saved and resumed.

Version k belongs to W(k), the weights after k updates. It holds the compute weights made from W(k), or with prediction
(`fiddlex.schedules.prediction`) from W(k) + D p(k), where D is the delay of the stage. This module is the only place
that turns master weights into versions. Prediction acts on the ZeRO-1 shards of the master weights, before the cast to
the compute dtype and before the gather over `data`; master weights stay as the optimizer made them.

The embedding runs with the first stage's delay and the head with the last stage's. Where these differ, a version holds
embedding and head twice.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fiddlex.config import Config
from fiddlex.models.weights import Weights
from fiddlex.parallel.host_memory import is_on_host
from fiddlex.parallel.sharding import named, zero_dimension
from fiddlex.pipeline.stage import Integer, in_least_padded_order
from fiddlex.schedules.prediction import stage_factors
from fiddlex.train.step.gradients import TILES, Update, compute_weights, outer
from fiddlex.train.step.state import SavedState, TrainState, WeightLayout


class Versions(NamedTuple):
    """The weight versions, a part of the train state."""

    weights: Weights  # compute weights, leaves [version, …]; version k has index k modulo the number of versions
    head: Weights  # embedding and head that the head runs with, stacked alike; empty if they are those of `weights`
    # the last update of the master weights, sharded like them; empty unless `extrapolate` of order 2 needs it next
    last_update: Mapping[str, Any]


class Factors(NamedTuple):
    """What prediction multiplies the last updates with (`stage_factors`), newest first; float32."""

    layers: Any  # [update, row of the stacked layers]
    embedding: Any  # [update], for the embedding and head with which the embedding runs
    head: Any  # [update], for the embedding and head with which the head runs


class VersionStore:
    """Makes versions of a run's weights and keeps them in a stack, for a layout whose pipeline has windows."""

    def __init__(self, config: Config, mesh: Mesh, layout: WeightLayout, optimizer: optax.GradientTransformation):
        self._mesh, self._layout, self._optimizer = mesh, layout, optimizer
        self._kind, self._order = config.pipeline.prediction, config.pipeline.prediction_order
        self._dtype = jnp.dtype(config.model.dtype)
        self._tile = TILES.get(mesh.devices.flat[0].platform)
        self._number = layout.pipeline.spec.sizes.versions
        # By the name of each semantics of the run, on the host; empty without prediction.
        self.factors = {} if self._kind == "none" else _factors(config, layout)
        stacked = jax.tree.map(lambda spec: P(None, *spec), layout.compute, is_leaf=lambda x: isinstance(x, P))
        self.specs = Versions(  # PartitionSpecs
            stacked,
            head=outer(stacked) if any(np.any(f.embedding != f.head) for f in self.factors.values()) else {},
            last_update=layout.master if config.pipeline.stores_last_update else {},
        )

    def start(self, weights: Weights) -> Versions:
        """All versions are the compute weights of these master weights; for use under `jit`."""

        def stack(weights: Weights, specs: Weights) -> Weights:
            stacked = jax.tree.map(lambda w: jnp.broadcast_to(w, (self._number, *w.shape)), self._compute(weights))
            return lax.with_sharding_constraint(stacked, named(self._mesh, specs))

        head = stack(outer(weights), self.specs.head) if self.specs.head else {}
        last_update = jax.tree.map(jnp.zeros_like, weights) if self.specs.last_update else {}
        return Versions(stack(weights, self.specs.weights), head, last_update)

    def abstract(self) -> Versions:
        """Shapes and dtypes of the versions."""
        return jax.eval_shape(self.start, self._layout.shapes)

    def add(self, versions: Versions, state: TrainState, update: Update, factors: Factors | tuple[()]) -> Versions:
        """Replaces the oldest version by that of `state`, to which `update` led; for use under `jit`.

        If the step skipped the update, the newest version is repeated. `factors` are those of the batches to come, `()`
        without prediction.
        """
        updates, newest = self._updates(versions, state, update), (state.step - 1) % self._number

        def put(stack: Weights, specs: Weights, ahead: Weights) -> Weights:
            def one(stack: jax.Array, made: jax.Array) -> jax.Array:
                made = jnp.where(update.kept, made, lax.dynamic_index_in_dim(stack, newest, keepdims=False))
                return lax.dynamic_update_index_in_dim(stack, made, state.step % self._number, 0)

            put = jax.tree.map(one, stack, self._compute(ahead))
            return lax.with_sharding_constraint(put, named(self._mesh, specs))

        embedding, head = state.weights, outer(state.weights)
        if factors:
            embedding = predicted(embedding, updates, factors.layers, factors.embedding)
            head = predicted(head, [outer(each) for each in updates], factors.layers, factors.head)
        last_update = {}
        if self.specs.last_update:
            # Only now may XLA overwrite the update before; without this, XLA on GPUs copies it before the whole step.
            embedding, change = lax.optimization_barrier((embedding, update.change))
            last_update = jax.tree.map(lambda a, b: jnp.where(update.kept, a, b), change, versions.last_update)
        return Versions(
            put(versions.weights, self.specs.weights, embedding),
            put(versions.head, self.specs.head, head) if self.specs.head else {},
            last_update,
        )

    def saved(self, versions: Versions, step: Integer) -> dict[str, Weights]:
        """The versions that a checkpoint holds, by name; without prediction the newest is made of the master weights.

        The names are `weights_A_updates_ago` and `head_A_updates_ago`, where A is the age of a version in updates.
        """
        return {
            name: jax.tree.map(
                lambda stack, age=age: lax.dynamic_index_in_dim(stack, (step - age) % self._number, keepdims=False),
                stack,
            )
            for what, stack in _stacks(versions).items()
            for name, age in self._ages(what).items()
        }

    def abstract_saved(self) -> dict[str, Weights]:
        """Shapes, dtypes and shardings of the versions that `saved` returns."""

        def abstract(x: jax.ShapeDtypeStruct, spec: P) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(self._mesh, spec))

        specs = {"weights": self._layout.compute, "head": outer(self._layout.compute)}
        saved = jax.eval_shape(self.saved, self.abstract(), jnp.int32(0))
        return {name: jax.tree.map(abstract, each, specs[name.partition("_")[0]]) for name, each in saved.items()}

    def resume(self, saved: SavedState) -> Versions:
        """The versions of a run that resumes from a checkpoint; for use under `jit`.

        In place of a version that the checkpoint lacks, the store uses the oldest version saved that is younger, or
        else the master weights.
        """
        versions = self.start(saved.weights)
        filled = {}
        for what, stack in _stacks(versions).items():
            found: Weights | None = None
            for name, age in self._ages(what).items():
                found = saved.older.get(name, found)
                if found is not None:
                    place = (saved.step - age) % self._number
                    stack = jax.tree.map(
                        lambda x, w, place=place: lax.dynamic_update_index_in_dim(x, w.astype(x.dtype), place, 0),
                        stack,
                        found,
                    )
            filled[what] = stack
        last_update = saved.last_update if self.specs.last_update and saved.last_update else versions.last_update
        return Versions(filled["weights"], filled.get("head", {}), last_update)

    def _ages(self, what: str) -> dict[str, int]:
        """The age in updates of each version of `what` that a checkpoint holds, by name, the youngest first."""
        return {f"{what}_{age}_updates_ago": age for age in range(0 if self.factors else 1, self._number)}

    def _updates(self, versions: Versions, state: TrainState, update: Update) -> list[Weights]:
        """The updates from which prediction estimates the next, newest first; for `momentum`, its estimate alone."""
        if self._kind == "momentum":
            expected = update.grads if self._order > 1 else jax.tree.map(jnp.zeros_like, update.grads)
            # Only after the update; without this, XLA on GPUs holds the state of the optimizer before it and after it.
            return [self._optimizer.update(*lax.optimization_barrier((expected, state.optimizer, state.weights)))[0]]
        return [update.change, dict(versions.last_update)] if self.specs.last_update else [update.change]

    def _compute(self, master: Weights) -> Weights:
        """The compute weights made from master weights or parts of them.

        The order in memory of shards to be gathered is fixed. Otherwise XLA on TPUs takes over the order that suits the
        gather for the whole update before it, with copies of all moments, whose padding may double them.
        """
        specs = {part: self._layout.master[part] for part in master}

        order = functools.partial(in_least_padded_order, tile=self._tile)

        def ordered(x: jax.Array, spec: P) -> jax.Array:
            free = zero_dimension(spec) is None or is_on_host(x)
            return x if free else jax.shard_map(order, mesh=self._mesh, in_specs=spec, out_specs=spec)(x)

        return compute_weights(jax.tree.map(ordered, master, specs), self._dtype, self._mesh, self._layout)


def _factors(config: Config, layout: WeightLayout) -> dict[str, Factors]:
    stages = np.asarray(layout.placement.stages)
    of_stages = {name: stage_factors(config, w.semantics) for name, w in layout.pipeline.windows.items()}
    return {name: Factors(each[:, stages], each[:, 0], each[:, -1]) for name, each in of_stages.items()}


def predicted(weights: Weights, updates: Sequence[Weights], of_rows: jax.Array, of_outer: jax.Array) -> Weights:
    """The master weights plus the sum of their updates, newest first, times the factors of each update.

    `of_rows`, float32 [update, row], is for the layers; `of_outer`, float32 [update], for embedding and head.
    """

    def ahead(part: str, w: jax.Array, *updates: jax.Array) -> jax.Array:
        for number, update in enumerate(updates):
            factor = of_rows[number].reshape(-1, *[1] * (w.ndim - 1)) if part == "layers" else of_outer[number]
            w = w + factor * update
        return w

    return {
        part: jax.tree.map(functools.partial(ahead, part), leaves, *(each[part] for each in updates))
        for part, leaves in weights.items()
    }


def _stacks(versions: Versions) -> dict[str, Weights]:
    return {"weights": versions.weights} | ({"head": versions.head} if versions.head else {})
