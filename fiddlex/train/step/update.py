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
from jax import lax
from jax.sharding import Mesh

from fiddlex.models.weights import Weights
from fiddlex.parallel.host_memory import is_on_host, map_rows, map_whole
from fiddlex.train.step.blockwise import Blocks

Path = jax.tree_util.KeyPath


class Applied(NamedTuple):
    """What an update leads to."""

    weights: Weights
    optimizer: optax.OptState
    grads: Weights  # what the optimizer made this of, after clipping; empty where the weights are in host memory
    change: Weights  # what the optimizer added to each weight; empty where the weights are in host memory
    finite: jax.Array  # bool scalar: whether all new weights are finite


Clip = Callable[[Weights], Weights]  # gradients, or some of them, to what the optimizer takes
# (gradients before clipping, state of the optimizer, weights, clipping, whether to make the update) -> the result
Apply = Callable[[Weights, optax.OptState, Weights, Clip, jax.Array], Applied]


def at_once(optimizer: optax.GradientTransformation) -> Apply:
    """The update of a state that is on the devices, all leaves at once."""

    def apply(grads: Weights, state: optax.OptState, weights: Weights, clip: Clip, good: jax.Array) -> Applied:
        clipped = clip(grads)
        change, new_state = optimizer.update(clipped, state, weights)
        new = optax.apply_updates(weights, change)
        new, new_state = _unless_skipped(good, (weights, state), (new, new_state))
        finite = jnp.all(jnp.asarray([jnp.isfinite(w).all() for w in jax.tree.leaves(new)]))
        return Applied(new, new_state, clipped, change, finite)

    return apply


def by_leaf(make_rule: Callable[..., optax.GradientTransformation], blocks: Blocks, mesh: Mesh) -> Apply:
    """The update of a state in host memory, leaf by leaf; `make_rule(blocks=…)` returns the rule for these blocks."""
    rules = {path: make_rule(blocks=_only(path, block)) for path, block in jax.tree.leaves_with_path(blocks)}

    def apply(grads: Weights, state: optax.OptState, weights: Weights, clip: Clip, good: jax.Array) -> Applied:
        old, gradient, state_of = map(_named, (weights, grads, state))
        new, new_state, finite = dict[str, jax.Array](), dict(state_of), jnp.int32(1)
        before: Any = ()
        # What is on the devices comes first, so that loops over rows have no other sums beside them: XLA:CPU runs
        # independent work side by side, and devices in two sums at a time would wait for each other.
        for path in sorted(rules, key=lambda path: is_on_host(old[_name(path)])):
            leaf, name = _Leaf(path, rules[path], old[_name(path)], clip, good), _name(path)
            own = {each: state_of[each] for each in _named(leaf.form)}
            # A leaf comes to the devices only once the one before it is back on the host. XLA would fetch all leaves
            # before the forward passes, and write many back at the end.
            parts = old[name], own, gradient[name]
            (weight, own, grad), before = lax.optimization_barrier((parts, before))
            _keep(before, new, new_state)
            weight, own, finite = leaf.updated(grad, own, weight, finite, mesh)
            before = {name: (weight, own)}
        _keep(before, new, new_state)
        return Applied(_like(weights, new), _like(state, new_state), {}, {}, finite == 1)

    return apply


class _Leaf:
    """The update of one weight by a rule for it alone, whose state has the paths of the state for all weights."""

    def __init__(self, path: Path, rule: optax.GradientTransformation, weight: jax.Array, clip: Clip, good: jax.Array):
        self._path, self._rule, self._clip, self._good = path, rule, clip, good
        # Shapes and dtypes of the parts of the optimizer's state that the rule uses.
        self.form = jax.eval_shape(rule.init, _only(path, jax.ShapeDtypeStruct(weight.shape, weight.dtype)))

    def updated(
        self, grad: jax.Array, own: dict[str, jax.Array], weight: jax.Array, finite: jax.Array, mesh: Mesh
    ) -> tuple[jax.Array, dict[str, jax.Array], jax.Array]:
        """The new weight, the new parts of the state, and `finite` if the weight is finite, else 0 (int32)."""
        is_stacked = self._path[0].key == "layers"
        mapped = {path: x for path, x in own.items() if x.shape == weight.shape or _has_rows(x, weight, is_stacked)}
        counters = {path: x for path, x in own.items() if path not in mapped}

        def rule(changed: Any, grad: jax.Array, other: Any) -> tuple[Any, Any]:
            weight, mapped = changed
            new, state, finite = self._one(grad, counters | mapped, weight)
            return (new, {path: state[path] for path in mapped}), (
                {path: state[path] for path in counters},
                other[1] * finite,
            )

        changed, other = (weight, mapped), (counters, finite)
        if not is_on_host(weight):
            changed, other = rule(changed, grad, other)
        elif is_stacked:
            changed, other = map_rows(rule, changed, grad, other, mesh=mesh)
        else:
            changed, other = map_whole(rule, changed, grad, other)
        return changed[0], changed[1] | other[0], other[1]

    def _one(
        self, grad: jax.Array, own: dict[str, jax.Array], weight: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array], jax.Array]:
        """The update of a weight, or of rows of it, on the devices."""
        state, before = _like(self.form, own), _only(self._path, weight)
        change, new_state = self._rule.update(self._clip(_only(self._path, grad)), state, before)
        after, new_state = _unless_skipped(
            self._good, (before, state), (optax.apply_updates(before, change), new_state)
        )
        (new,) = jax.tree.leaves(after)
        return new, _named(new_state), jnp.isfinite(new).astype(jnp.int32).min()


def _keep(updated: Any, new: dict[str, jax.Array], new_state: dict[str, jax.Array]) -> None:
    """Adds a new weight and the new parts of its state, by the weight's name, to those of other weights."""
    for name, (weight, own) in dict(updated).items():
        new[name] = weight
        new_state |= own


def _unless_skipped(good: jax.Array, before: Any, after: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(good, b, a), before, after)


def _has_rows(x: jax.Array, weight: jax.Array, is_stacked: bool) -> bool:
    """Whether a part of the state has a row for each of the rows of a stacked weight."""
    return is_stacked and x.shape[:1] == weight.shape[:1]


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
