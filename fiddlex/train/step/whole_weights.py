"""Runs an update rule on whole weights: those that a model on one device would have.

In a run the layers' weights are stacked in the order of the pipeline's rows, with rows of zeros where a stage has fewer
layers, and the vocabulary is padded. A rule that is not elementwise takes the plain tree instead: `layers` is a list
with a tree for each layer, in order, and nothing is padded. Invariant: the rule's state, between the steps, is stacked
and padded as the weights are, so that it is sharded, saved and moved to another mesh as the state of other rules is.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fiddlex.errors import ConfigError
from fiddlex.models.weights import Weights
from fiddlex.schedules.placement import PADDING
from fiddlex.train.step.blockwise import Blocks
from fiddlex.train.step.state import WeightLayout

Path = jax.tree_util.KeyPath


@dataclasses.dataclass(frozen=True)
class WholeWeights:
    """Takes trees of a run apart into plain trees, and puts them together again."""

    layout: WeightLayout
    blocks: Blocks
    mesh: Mesh

    def shapes(self) -> Weights:
        """ShapeDtypeStructs of the plain weights."""
        return jax.eval_shape(self.apart, self.layout.shapes)

    def rule(self, rule: optax.GradientTransformation) -> optax.GradientTransformation:
        """A rule for the weights of the run that does to the plain weights what `rule` does."""

        def init(weights: Any) -> Any:
            return _each(rule.init(self.apart(weights)), list, self.together)

        def update(grads: Any, state: Any, weights: Any = None) -> Any:
            plain = _each(state, dict, self.apart)
            updates, new = rule.update(self.apart(grads), plain, self.apart(weights))
            return self.together(updates), _each(new, list, self.together)

        return optax.GradientTransformation(init, update)

    def apart(self, tree: Any) -> Any:
        """The plain form of weights, or of a part of a state that has an array, of any shape, for each weight.

        Each device gets its shards of all layers, which it has of its own pipe rank's alone.
        """
        layers = jax.tree.map_with_path(functools.partial(self._placed, rows=False), {"layers": tree["layers"]})
        rows = self.layout.placement.rows
        return {part: self._outer(part, tree, _cut) for part in tree if part != "layers"} | {
            "layers": [jax.tree.map(lambda x, row=row: x[row], layers["layers"]) for row in rows]
        }

    def together(self, plain: Any) -> Any:
        """The inverse of `apart`."""
        first, *others = plain["layers"]
        for number, each in enumerate(others, 1):
            if differing := _form(each) ^ _form(first):
                raise ConfigError(
                    f"optimizer.name: the state of the rule has {min(differing)} for only one of layer 0 and layer "
                    f"{number}. Layers move from device to device, so a rule must keep the same arrays for all of "
                    "them. Give all layers one rule, and multiply the updates of those by 0 that shall stay."
                )

        def stack(*each: jax.Array) -> jax.Array:
            return jnp.stack(
                [jnp.zeros_like(each[0]) if layer == PADDING else each[layer] for layer in self.layout.placement.layers]
            )

        layers = {"layers": jax.tree.map(stack, first, *others)}
        return {part: self._outer(part, plain, _pad) for part in plain if part != "layers"} | jax.tree.map_with_path(
            functools.partial(self._placed, rows=True), layers
        )

    def _placed(self, path: Path, x: jax.Array, *, rows: bool) -> jax.Array:
        """A stacked array sharded as its weight is, with the rows divided over `pipe` or not."""
        spec, weight = _at(path, self.layout.master), _at(path, self.layout.shapes)
        if x.shape != weight.shape:
            return x
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(spec[0] if rows else None, *spec[1:])))

    def _outer(self, part: str, tree: Any, change: Callable[[jax.Array, int, tuple[int, ...]], jax.Array]) -> Any:
        """A part of a tree outside the layers, where padded weights are changed."""

        def one(path: Path, x: jax.Array) -> jax.Array:
            block, padded = _at(path, self.blocks), _at(path, self.layout.shapes).shape
            return x if block.padding == 1 else change(x, round(padded[0] / block.padding), padded)

        changed: Any = jax.tree.map_with_path(one, {part: tree[part]})[part]
        return changed


def _cut(x: jax.Array, real: int, padded: tuple[int, ...]) -> jax.Array:
    return x[:real] if x.shape == padded else x


def _pad(x: jax.Array, real: int, padded: tuple[int, ...]) -> jax.Array:
    return jnp.pad(x, [(0, padded[0] - real), *[(0, 0)] * (x.ndim - 1)]) if x.shape == (real, *padded[1:]) else x


def _each(state: Any, layers: type, change: Callable[[Any], Any]) -> Any:
    """Changes those parts of a state that have an array for each weight, whose `layers` are of a type."""

    def is_one(x: Any) -> bool:
        return isinstance(x, dict) and isinstance(x.get("layers"), layers)

    return jax.tree.map(lambda x: change(x) if is_one(x) else x, state, is_leaf=is_one)


def _form(tree: Any) -> set[str]:
    """Path, dtype and shape of each array of a tree."""
    return {f"{jax.tree_util.keystr(path)} {x.dtype}{list(x.shape)}" for path, x in jax.tree.leaves_with_path(tree)}


def _at(path: Path, tree: Any) -> Any:
    """What a tree of dictionaries has for a weight, from the path of an array of that weight's state."""
    for key in path:
        if isinstance(tree, dict):
            tree = tree[key.key]
    return tree
