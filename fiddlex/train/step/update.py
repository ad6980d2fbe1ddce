"""The optimizer's update of a train state, on the devices or leaf by leaf from host memory (`optimizer.offload`).

With `optimizer.offload`, matrices and tables and their moments, almost all of the state, are in host memory between the
steps. A step updates one leaf after another, and of the layers' leaves one row after another (`map_rows`): the devices
hold two rows at most. Every rule of `fiddlex.train.step.optimizer` treats each weight by itself, and each layer of a
stacked weight, so that both ways change the weights alike.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from fiddlex.models.weights import Weights
from fiddlex.parallel.host_memory import fetched, is_on_host, map_rows
from fiddlex.train.step.blockwise import Blocks

Path = jax.tree_util.KeyPath


class Applied(NamedTuple):
    """What an update leads to.

    Attributes:
      weights: the new master weights.
      optimizer: the new state of the optimizer.
      change: what the optimizer added to each weight; empty where the weights are in host memory.
      finite: bool scalar: whether all new weights are finite.
    """

    weights: Weights
    optimizer: optax.OptState
    change: Weights
    finite: jax.Array


# (gradients after clipping, state of the optimizer, weights, whether to make the update) -> the result
Apply = Callable[[Weights, optax.OptState, Weights, jax.Array], Applied]


def at_once(optimizer: optax.GradientTransformation) -> Apply:
    """The update of a state that is on the devices, all leaves at once."""

    def apply(grads: Weights, state: optax.OptState, weights: Weights, good: jax.Array) -> Applied:
        change, new_state = optimizer.update(grads, state, weights)
        new = optax.apply_updates(weights, change)
        new, new_state = _unless_skipped(good, (weights, state), (new, new_state))
        finite = jnp.all(jnp.asarray([jnp.isfinite(w).all() for w in jax.tree.leaves(new)]))
        return Applied(new, new_state, change, finite)

    return apply


def by_leaf(make_rule: Callable[..., optax.GradientTransformation], blocks: Blocks, mesh: Mesh) -> Apply:
    """The update of a state that is in host memory, leaf by leaf.

    Args:
      make_rule: returns the optimizer for some of the weights, whose blocks it takes as `blocks`.
      blocks: a `Block` for every weight.
      mesh: the mesh of the run.
    """
    rules = {path: make_rule(blocks=_only(path, block)) for path, block in jax.tree.leaves_with_path(blocks)}

    def apply(grads: Weights, state: optax.OptState, weights: Weights, good: jax.Array) -> Applied:
        before = _named(state)
        old, gradient = _named(weights), _named(grads)
        after, new, finite = dict(before), {}, jnp.bool(True)
        for path, rule in rules.items():
            leaf, name = _Leaf(path, rule, good, old[_name(path)]), _name(path)
            own = {each: before[each] for each in _named(leaf.form)}
            new[name], changed, is_finite = leaf.updated(gradient[name], own, old[name], mesh)
            after |= changed
            finite &= is_finite
        return Applied(_like(weights, new), _like(state, after), {}, finite)

    return apply


class _Leaf:
    """The update of one weight.

    Args:
      path: the path of the weight.
      rule: the optimizer for this weight alone, whose state has the paths that it has in the state for all weights.
      good: whether to make the update.
      weight: the weight.

    Attributes:
      form: shapes and dtypes of the parts of the optimizer's state that the rule uses.
    """

    def __init__(self, path: Path, rule: optax.GradientTransformation, good: jax.Array, weight: jax.Array):
        self._path, self._rule, self._good = path, rule, good
        self.form = jax.eval_shape(rule.init, _only(path, jax.ShapeDtypeStruct(weight.shape, weight.dtype)))

    def updated(
        self, grad: jax.Array, own: dict[str, jax.Array], weight: jax.Array, mesh: Mesh
    ) -> tuple[jax.Array, dict[str, jax.Array], jax.Array]:
        """The new weight, the new parts of the state, and whether the weight is finite."""
        if not is_on_host(weight) or self._path[0].key != "layers":
            new, state, finite = self._one(grad, fetched(own), fetched(weight))
            return _where(weight, new), {path: _where(own[path], x) for path, x in state.items()}, finite
        stacked = {path: x for path, x in own.items() if x.ndim and x.shape[0] == weight.shape[0]}
        counters = {path: x for path, x in own.items() if path not in stacked}

        def rule(changed: Any, grad: jax.Array, other: Any) -> tuple[Any, Any]:
            weight, rows = changed
            new, state, finite = self._one(grad, counters | rows, weight)
            return (new, {path: state[path] for path in rows}), (
                {path: state[path] for path in counters},
                other[1] & finite,
            )

        (weight, stacked), (counters, finite) = map_rows(
            rule, (weight, stacked), grad, (counters, jnp.bool(True)), mesh=mesh
        )
        return weight, stacked | counters, finite

    def _one(
        self, grad: jax.Array, own: dict[str, jax.Array], weight: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array], jax.Array]:
        """The update of a weight, or of rows of it, on the devices."""
        state, before = _like(self.form, own), _only(self._path, weight)
        change, new_state = self._rule.update(_only(self._path, grad), state, before)
        after, new_state = _unless_skipped(
            self._good, (before, state), (optax.apply_updates(before, change), new_state)
        )
        (new,) = jax.tree.leaves(after)
        return new, _named(new_state), jnp.isfinite(new).all()


def _unless_skipped(good: jax.Array, before: Any, after: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(good, b, a), before, after)


def _where(before: jax.Array, after: jax.Array) -> jax.Array:
    """`after` in the memory in which `before` is."""
    return jax.device_put(after, jax.memory.Space.Host) if is_on_host(before) else after


def _only(path: Path, leaf: Any) -> Any:
    """Nested dictionaries that have one leaf, at a path."""
    for key in reversed(path):
        leaf = {key.key: leaf}
    return leaf


_name = jax.tree_util.keystr  # of a path


def _named(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by the names of their paths."""
    return {_name(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def _like(tree: Any, leaves: dict[str, Any]) -> Any:
    """A tree of the structure of `tree` with the leaves that have the names of its paths."""
    return jax.tree.map_with_path(lambda path, _: leaves[_name(path)], tree)
