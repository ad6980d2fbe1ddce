"""The update rule that a function of the user's gives, tried out before a run starts (`fiddlex.config.user_code`).

A rule is written for plain weights. In a run the weights of all layers are stacked, vocabulary and stages are padded
with zeros, and with `optimizer.offload` each weight is updated by itself. A rule that says it is elementwise gets them
so, and one that says it is not gets whole weights (`fiddlex.train.step.whole_weights`). Invariant: a rule that would
change the weights otherwise in a run is refused.
"""

import copy
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from fiddlex.config import OptimizerConfig
from fiddlex.config.user_code.own_rules import RULE, rule_function
from fiddlex.config.user_code.python_files import errors_of
from fiddlex.config.values.schedule_source import source_of
from fiddlex.errors import ConfigError
from fiddlex.models.weights import Weights
from fiddlex.train.step.state import of_weight

MOST, PADDING, STEPS = 4, 2, 3  # of the trial: elements along a dimension at most, rows of padding, and updates
MOST_CONSTANTS = 1024  # elements of an array that a rule may keep beside those of the weights
HALVES = (lambda x: x[..., : x.shape[-1] // 2], lambda x: x[..., x.shape[-1] // 2 :])
TOLERANCE = 1e-4  # relative, of the updates; far above rounding


def own_rule(config: OptimizerConfig) -> optax.GradientTransformation:
    """The rule of a config whose `name` is a function: it turns gradients into the direction of the update."""
    source, function = source_of(config.name), rule_function(config.name).function
    with RULE.naming(config.name):
        rule = RULE.call(function, source.path, {"config": copy.deepcopy(config)})  # it may change the copy
        if not isinstance(rule, optax.GradientTransformation):
            raise ConfigError(f"it returned {rule!r}; it must return an optax.GradientTransformation.")
    return rule


def check_own_rule(config: OptimizerConfig, weights: Weights) -> None:
    """Raises ConfigError unless the rule of a config whose `name` is a function passes some updates of small weights.

    It must not fail, must keep what it says, must point along the gradients, and must keep the module's invariant.

    Args:
      config: the section of a valid config.
      weights: ShapeDtypeStructs of the plain weights (`fiddlex.train.step.whole_weights`).
    """
    rule, says = own_rule(config), rule_function(config.name)
    name, path = config.name, source_of(config.name).path
    if config.offload and not says.elementwise:
        raise ConfigError(
            f"optimizer.name {name}: the function says elementwise = False with optimizer.offload=true. With it, "
            "weights come to the devices a few rows at a time, and the rule needs whole ones. Use "
            "optimizer.offload=false, or a rule that is elementwise."
        )
    random = np.random.default_rng(0)
    # A rule that is elementwise cannot tell layers apart.
    some = weights | {"layers": weights["layers"][:1]} if says.elementwise else weights
    small, grads = _random(random, some), _random(random, some, STEPS)
    with RULE.naming(name), errors_of(path):
        found = _kept(rule, weights, elementwise=says.elementwise)
        plain, along, state = _updates(rule, small, grads)
    if found != says.moments:
        raise ConfigError(
            f"optimizer.name {name}: the function says moments = {says.moments}, and the state of its rule has "
            f"{found} float32 numbers for each weight. Set moments to that: memory is predicted from it."
        )
    for what, tree in {"updates": plain, "numbers in its state": state}.items():
        if not all(np.isfinite(x).all() for x in jax.tree.leaves(tree)):
            raise ConfigError(
                f"optimizer.name {name}: in a trial with random weights and gradients the rule gives {what} that are "
                "not finite. Mend what divides by zero or takes the root of a negative number."
            )
    if along < 0:
        raise ConfigError(
            f"optimizer.name {name}: in a trial with random weights and gradients the rule's updates point against "
            "the gradients, and fiddlex subtracts what a rule returns, times the learning rate of "
            "optimizer.learning_rate and optimizer.schedule. Return the part of the rule without its learning rate, as "
            "optax.scale_by_adam() of optax.adam(…), or turn it around: optax.chain(optax.adam(1.0), optax.scale(-1))."
        )
    if not says.elementwise:
        return
    with RULE.naming(name), errors_of(path):
        for how, updates in _otherwise(rule, small, grads, alone=config.offload):
            if not all(map(_close, *map(jax.tree.leaves, (updates, plain)))):
                raise ConfigError(
                    f"the function says elementwise = True, and the rule gives weights {how} other updates than the "
                    "same weights all together as they are, since it uses their shapes, statistics over them or random "
                    "numbers. Say elementwise = False, and the rule gets whole weights; or treat each element of a "
                    "weight alike, as Adam does."
                )


def _otherwise(
    rule: optax.GradientTransformation, weights: Weights, grads: Weights, *, alone: bool
) -> Iterator[tuple[str, Weights]]:
    """The rule's updates of the same weights in other forms, which those of an elementwise rule do not depend on.

    `grads` have the gradients of each update along their first axis.
    """
    halves = [_updates(rule, *(jax.tree.map(half, each) for each in (weights, grads)))[0] for half in HALVES]
    yield "that are cut in halves", jax.tree.map(lambda *each: np.concatenate(each, axis=-1), *halves)
    stacked = _updates(rule, _stacked(weights, axis=0), _stacked(grads, axis=1))[0]
    yield "that are stacked over layers and padded with zeros", _plain(stacked, len(weights["layers"]))
    if alone:
        leaves, structure = jax.tree.flatten(weights)
        parts = zip(leaves, jax.tree.leaves(grads), strict=True)
        updates = [_updates(rule, {"weight": w}, {"weight": g})[0]["weight"] for w, g in parts]
        yield "that come one at a time (optimizer.offload=true)", jax.tree.unflatten(structure, updates)


def _random(random: np.random.Generator, weights: Weights, *before: int) -> Weights:
    """Random arrays for plain weights, of a few elements, with axes of the sizes `before` before their own.

    In place of a weight without dimensions stands one with a dimension, since it is to be cut in halves.
    """

    def one(x: Any) -> jax.Array:
        sizes = (min(n, MOST) for n in x.shape or (MOST,))
        return jnp.asarray(random.normal(size=(*before, *sizes)), jnp.float32)

    return jax.tree.map(one, weights)


def _stacked(plain: Weights, *, axis: int) -> Weights:
    """The same tree with the layers stacked along `axis`, and zeros at the end of it in all arrays."""
    rows = jax.tree.map(lambda *each: jnp.stack(each, axis), *plain["layers"])
    return jax.tree.map(
        lambda x: jnp.pad(x, [(0, PADDING * (i == axis)) for i in range(x.ndim)]), plain | {"layers": rows}
    )


def _plain(stacked: Weights, num_layers: int) -> Weights:
    """The inverse of `_stacked`."""
    rows = jax.tree.map(lambda x: x[:-PADDING], stacked)
    return rows | {"layers": [jax.tree.map(lambda x, row=row: x[row], rows["layers"]) for row in range(num_layers)]}


def _kept(rule: optax.GradientTransformation, weights: Weights, *, elementwise: bool) -> int:
    """How many float32 numbers the rule keeps for each weight, rounded up; ConfigError if they do not suit a run."""
    shapes = {x.shape for x in jax.tree.leaves(weights)}
    before = jax.eval_shape(rule.init, weights)
    updates, after = jax.eval_shape(functools.partial(_update, rule), weights, before, weights)
    if (was := _form(weights)) != (now := _form(updates)):
        raise ConfigError(
            f"it turns gradients {_difference(weights, updates) or f'{was} into {now}'}. A rule must return an update "
            "of the same shape and dtype for each gradient."
        )
    if (was := _form(before)) != (now := _form(after)):
        raise ConfigError(
            f"an update turns its state {was} into {now}. A rule's state must keep its structure, shapes and dtypes."
        )
    if any(jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) for x in jax.tree.leaves(before)):
        raise ConfigError(
            "its state has a random key, which checkpoints cannot hold. Keep the key's numbers, "
            "jax.random.key_data(key), and make the key of them with jax.random.wrap_key_data."
        )
    paths = dict(jax.tree.leaves_with_path(weights))
    state = [(path, x) for path, x in jax.tree.leaves_with_path(before) if x.shape]
    if elementwise and (other := [x.shape for _, x in state if x.shape not in shapes]):
        raise ConfigError(
            f"its state has an array of shape {other[0]}, which no weight has: fiddlex divides the state among devices "
            "as it divides the weights. A rule may keep arrays of the weights' shapes, and scalars."
        )
    of_none = [x for path, x in state if of_weight(path, paths) is None]
    if any(elementwise or x.size > MOST_CONSTANTS for x in of_none):
        raise ConfigError(
            "its state does not tell which array belongs to which weight, and fiddlex divides the state among devices "
            "as it divides the weights. A rule may keep trees of the weights' structure, such as "
            "jax.tree.map(jnp.zeros_like, weights), and scalars; its init may not take the weights apart."
        )
    weight_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(weights))
    state_bytes = sum(x.size * x.dtype.itemsize for path, x in state if of_weight(path, paths) is not None)
    return -(-state_bytes // weight_bytes)


def _update(rule: optax.GradientTransformation, grads: Weights, state: Any, weights: Weights) -> Any:
    """What the rule returns; ConfigError if it needs other arguments, such as the loss."""
    try:
        return rule.update(grads, state, weights)
    except TypeError as error:
        if "argument" not in str(error):
            raise
        raise ConfigError(
            f"{error}. A rule's update gets gradients, state and weights, in this order, and nothing else: no loss and "
            "no function of the weights. Use a rule that needs no more."
        ) from error


def _difference(weights: Weights, updates: Any) -> str:
    """The first gradient whose update has another shape or dtype, and how; empty where another thing differs."""
    found = dict(jax.tree.leaves_with_path(updates))
    for path, x in jax.tree.leaves_with_path(weights):
        if path in found and _array(x) != _array(found[path]):
            return f"{jax.tree_util.keystr(path)} of {_array(x)} into {_array(found[path])}"
    return ""


def _form(state: Any) -> str:
    """The structure of a state with the type of each array."""
    return str(jax.tree.map(_array, state))


def _array(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}"


def _updates(rule: optax.GradientTransformation, weights: Weights, grads: Weights) -> tuple[Weights, float, Any]:
    """The rule's updates for gradients along the first axis of `grads`, one after another.

    Returns:
      The sum of the updates, the sum of their products with their gradients, and the last state.
    """

    def updates(weights: Weights, grads: Weights) -> Any:
        def one(carry: Any, grads: Weights) -> Any:
            state, total, along = carry
            change, state = rule.update(grads, state, weights)
            return (state, jax.tree.map(jnp.add, total, change), along + optax.tree.vdot(change, grads)), None

        (state, total, along), _ = lax.scan(
            one, (rule.init(weights), jax.tree.map(jnp.zeros_like, weights), jnp.float32(0)), grads
        )
        return total, along, state

    found: tuple[Weights, float, Any] = jax.device_get(jax.jit(updates)(weights, grads))
    return found


def _close(x: Any, y: Any) -> bool:
    return bool(np.allclose(x, y, rtol=TOLERANCE, atol=TOLERANCE * float(np.abs(y).max())))
