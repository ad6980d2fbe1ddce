"""The update rule that a function of the user's gives, tried out before a run starts (`fiddlex.config.user_code`).

A rule is written for plain weights. In a run the weights of all layers are stacked, vocabulary and stages are padded
with zeros, and with `optimizer.offload` each weight is updated by itself. Invariant: a rule that would change the
weights otherwise then is refused.
"""

import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fiddlex.config import OptimizerConfig
from fiddlex.config.user_code.own_rules import OWN, rule_function
from fiddlex.config.user_code.python_files import errors_of
from fiddlex.config.values.schedule_source import source_of
from fiddlex.errors import ConfigError
from fiddlex.models.weights import Weights

LAYERS, PADDING = ("0", "1", "2"), 2  # of the trial: its layers, and rows of padding
TOLERANCE = 1e-4  # relative, of the updates; far above rounding


def own_rule(config: OptimizerConfig) -> optax.GradientTransformation:
    """The rule of a config whose `name` is a function: it turns gradients into the direction of the update."""
    source, (function, _) = source_of(config.name), rule_function(config.name)
    with OWN.naming(config.name):
        rule = OWN.call(function, source.path, {"config": copy.deepcopy(config)})  # it may change the copy
        if not isinstance(rule, optax.GradientTransformation):
            raise ConfigError(f"it returned {rule!r}; it must return an optax.GradientTransformation.")
    return rule


def check_own_rule(config: OptimizerConfig) -> None:
    """Raises ConfigError unless the rule of a config whose `name` is a function passes a few updates of a few weights.

    It must not fail, must keep as many numbers as it says, and must keep the module's invariant.
    """
    rule, (_, moments) = own_rule(config), rule_function(config.name)
    random = np.random.default_rng(0)
    weights = _random(random)
    grads = [_random(random) for _ in range(3)]
    with OWN.naming(config.name), errors_of(source_of(config.name).path):
        found = _kept(rule, weights, grads[0])
        plain = _updates(rule, weights, grads)
        stacked = _plain(_updates(rule, _stacked(weights), [_stacked(each) for each in grads]))
        alone = {}
        if config.offload:
            leaves, structure = jax.tree.flatten(weights)
            parts = zip(leaves, *map(jax.tree.leaves, grads), strict=True)
            updates = [_updates(rule, {"weight": w}, [{"weight": g} for g in each])["weight"] for w, *each in parts]
            alone = {"that come one at a time (optimizer.offload=true)": jax.tree.unflatten(structure, updates)}
    if found != moments:
        raise ConfigError(
            f"optimizer.name {config.name}: the function says moments = {moments}, and the state of its rule has "
            f"{found} float32 numbers for each weight. Set moments to that: memory is predicted from it."
        )
    if not all(np.isfinite(x).all() for x in jax.tree.leaves(plain)):
        raise ConfigError(
            f"optimizer.name {config.name}: in a trial with random weights and gradients the rule gives updates that "
            "are not finite. Mend what divides by zero or takes the root of a negative number."
        )
    for how, updates in ({"that are stacked over layers and padded with zeros": stacked} | alone).items():
        if not all(map(_close, *map(jax.tree.leaves, (updates, plain)))):
            raise ConfigError(
                f"optimizer.name {config.name}: the rule gives weights {how} other updates than the same weights all "
                "together as they are, since it uses their shapes, statistics over them or random numbers. A rule must "
                "treat each element of a weight alike, as Adam does."
            )


def _random(random: np.random.Generator) -> Weights:
    """A tree like that of weights, with the layers one beside the other."""
    layers = {name: {"kernel": random.normal(size=(4, 6)), "bias": random.normal(size=6)} for name in LAYERS}
    tree = {"layers": layers, "table": random.normal(size=(5, 4))}
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)


def _stacked(plain: Weights) -> Weights:
    """The same tree with the layers stacked, and rows of zeros below them and below the table."""
    rows = jax.tree.map(lambda *each: jnp.stack(each), *plain["layers"].values())
    return jax.tree.map(lambda x: jnp.pad(x, [(0, PADDING)] + [(0, 0)] * (x.ndim - 1)), plain | {"layers": rows})


def _plain(stacked: Weights) -> Weights:
    """The inverse of `_stacked`."""
    rows = jax.tree.map(lambda x: x[:-PADDING], stacked)
    layers = {name: jax.tree.map(lambda x, row=row: x[row], rows["layers"]) for row, name in enumerate(LAYERS)}
    return rows | {"layers": layers}


def _kept(rule: optax.GradientTransformation, weights: Weights, grads: Weights) -> int:
    """How many float32 numbers the rule keeps for each weight, rounded up."""
    shapes = {x.shape for x in jax.tree.leaves(weights)}
    before = jax.eval_shape(rule.init, weights)
    _, after = jax.eval_shape(rule.update, grads, before, weights)
    if (was := _form(before)) != (now := _form(after)):
        raise ConfigError(
            f"an update turns its state {was} into {now}. A rule's state must keep its structure, shapes and dtypes."
        )
    state = [x for x in jax.tree.leaves(before) if x.shape]
    if other := [x.shape for x in state if x.shape not in shapes]:
        raise ConfigError(
            f"its state has an array of shape {other[0]}, which no weight has: fiddlex divides the state among devices "
            "as it divides the weights. A rule may keep arrays of the weights' shapes, and scalars."
        )
    try:  # as `fiddlex.train.step.state.state_shardings` finds the arrays of each weight
        optax.tree.map_params(rule, lambda x, weight: x, before, weights)
    except Exception as error:
        raise ConfigError(
            "its state does not tell which array belongs to which weight, and fiddlex divides the state among devices "
            "as it divides the weights. A rule may keep trees of the weights' structure, such as "
            "jax.tree.map(jnp.zeros_like, weights), and scalars; its init may not take the weights apart."
        ) from error
    weight_bytes = sum(x.nbytes for x in jax.tree.leaves(weights))
    return -(-sum(x.size * x.dtype.itemsize for x in state) // weight_bytes)


def _form(state: Any) -> str:
    """The structure of a state with the type of each array."""
    leaves, structure = jax.tree.flatten(state)
    return str(jax.tree.unflatten(structure, [f"{x.dtype}{list(x.shape)}" for x in leaves]))


def _updates(rule: optax.GradientTransformation, weights: Weights, grads: list[Weights]) -> Weights:
    """The sum of the rule's updates of weights with these gradients, one after another."""

    def updates(weights: Weights, grads: list[Weights]) -> Weights:
        state, total = rule.init(weights), jax.tree.map(jnp.zeros_like, weights)
        for each in grads:
            change, state = rule.update(each, state, weights)
            total = jax.tree.map(jnp.add, total, change)
        return total

    found: Weights = jax.device_get(jax.jit(updates)(weights, grads))
    return found


def _close(x: Any, y: Any) -> bool:
    return bool(np.allclose(x, y, rtol=TOLERANCE, atol=TOLERANCE * float(np.abs(y).max())))
