"""A trainer for one device, written apart from fiddlex: no mesh, no scan, whole logits, `jax.grad`.

It shares with fiddlex only the names in the weights dictionary and the written definition of the dropout masks
(`fiddlex/models/dropout.py`: which key belongs to which element). Layers are unstacked before the optimizer sees them.
"""

import copy
import dataclasses
import functools
import runpy
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fiddlex.config import Config
from fiddlex.config.values.schedule_source import is_function

Tree = Any


def unstack(weights: Tree) -> Tree:
    """Canonical weights with `layers` as a list of dictionaries."""
    count = jax.tree.leaves(weights["layers"])[0].shape[0]
    layers = [jax.tree.map(lambda w, i=i: w[i], weights["layers"]) for i in range(count)]
    return jax.tree.map(jnp.asarray, weights | {"layers": layers})


class Delays(NamedTuple):
    """By how many updates the weights of each part of the model lag behind."""

    embedding: int
    layers: tuple[int, ...]
    head: int


def train(
    config: Config,
    weights: Tree,
    batches: list[dict[str, np.ndarray]],
    delays: Callable[[int], Delays] | None = None,
    loss_fn: Callable[[Tree, Tree, jax.Array, Config], jax.Array] | None = None,
) -> dict[str, Any]:
    """Losses, gradient norms, final weights and optimizer state of plain training on `batches`, by default of a GPT.

    `delays(step)` gives each part's delay: the gradient is taken at W(max(step − delay, 0)) and applied to the newest
    weights. With prediction (`config.pipeline`) it is taken at W(k) + D p(k), where k is max(step − delay, 0), D is the
    part's delay in step k, and p(k) estimates an update (`predicted_update`).
    """
    weights = unstack(weights)
    history, predicted = [weights], [jax.tree.map(jnp.zeros_like, weights)]
    optimizer = make_optimizer(config)

    @jax.jit
    def update(weights: Tree, state: Tree, grads: Tree, scale: jax.Array) -> Any:
        updates, state = optimizer.update(jax.tree.map(lambda g: g * scale, grads), state, weights)
        return optax.apply_updates(weights, updates), state

    # No update rule looks from one tensor to another, so that each layer is updated alone, by one compiled program.
    # One of a function of the user's may.
    each = _whole if is_function(config.optimizer.name) else in_parts
    state = each(jax.jit(optimizer.init), weights)
    losses, norms = [], []
    for number, batch in enumerate(batches):
        lag = delays(number) if delays else Delays(0, (0,) * len(weights["layers"]), 0)

        def version(lag: int, of: Callable[[Delays], int], part: Callable[[Tree], Tree], number: int = number) -> Tree:
            k = max(number - lag, 0)
            if config.pipeline.prediction == "none":
                return part(history[k])
            ahead = of(delays(k)) if delays else 0
            return jax.tree.map(lambda w, p: w + ahead * p, part(history[k]), part(predicted[k]))

        stale = {
            "embedding": version(lag.embedding, lambda d: d.embedding, lambda w: w["embedding"]),
            "layers": [
                version(d, lambda d, i=i: d.layers[i], lambda w, i=i: w["layers"][i]) for i, d in enumerate(lag.layers)
            ],
            "head": version(lag.head, lambda d: d.head, lambda w: w["head"] | {"tokens": _table(w)}),
        }
        loss, grads = jax.value_and_grad(loss_fn or gpt_loss_fn)(stale, batch, jnp.int32(number), config)
        tied = grads["head"].pop("tokens")
        if jax.tree.leaves(tied):
            grads["embedding"]["tokens"] = jax.tree.map(jnp.add, grads["embedding"]["tokens"], tied)
        norm = np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in jax.tree.leaves(grads)))
        most = config.optimizer.clip_norm
        scale = jnp.float32(most / norm if most and norm > most else 1)
        updated = each(functools.partial(update, scale=scale), weights, state, grads)
        weights, state = (each(lambda pair, i=i: pair[i], updated) for i in (0, 1))
        history.append(weights)
        if config.pipeline.prediction == "momentum":
            expected = scale if config.pipeline.prediction_order == 2 else jnp.float32(0)
            updated = each(functools.partial(update, scale=expected), weights, state, grads)
            following = each(lambda pair: pair[0], updated)
            scaled = jax.tree.map(lambda a, b: config.pipeline.prediction_scale * (a - b), following, weights)
            predicted.append(scaled)
        elif config.pipeline.prediction == "extrapolate":
            predicted.append(extrapolated(history, config))
        losses.append(float(loss))
        norms.append(float(norm))
    return {"losses": losses, "norms": norms, "weights": weights, "optimizer": state}


def _table(weights: Tree) -> Tree:
    """The embedding's table, which the head may use too; empty where there is none of that name."""
    return weights["embedding"].get("tokens", {})


def extrapolated(history: list[Tree], config: Config) -> Tree:
    """The next update as the last one, or with order 2 as the momentum's recurrence continues it."""
    scale, momentum = config.pipeline.prediction_scale, config.optimizer.beta1
    if config.optimizer.name in ("sgd", "muon"):
        momentum = config.optimizer.momentum
    newest, before, earlier = (history[max(len(history) - age, 0)] for age in (1, 2, 3))
    if config.pipeline.prediction_order == 1:
        return jax.tree.map(lambda a, b: scale * (a - b), newest, before)
    return jax.tree.map(lambda a, b, c: scale * ((a - b) + momentum * ((a - b) - (b - c))), newest, before, earlier)


def in_parts(function: Callable[..., Any], weights: Tree, *others: Tree) -> Tree:
    """What `function` gives for the embedding, each layer, and the head of the trees."""
    trees = (weights, *others)
    layers = [function(*parts) for parts in zip(*(tree["layers"] for tree in trees), strict=True)]
    return {name: function(*(tree[name] for tree in trees)) for name in ("embedding", "head")} | {"layers": layers}


def _whole(function: Callable[..., Any], *trees: Tree) -> Tree:
    return function(*trees)


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """The update rule, after clipping."""
    section = config.optimizer
    rate = optax.constant_schedule(section.learning_rate)
    if is_function(section.schedule):
        rate = _function(section.schedule)(config=section, num_steps=config.train.num_steps)
    # Names of the matrices; norms and biases are left alone.
    decayed = {"kernel", "tokens", "positions", "token_types", "score", "output", "embedding"}

    def decay(weights: Tree) -> Tree:
        return jax.tree_util.tree_map_with_path(lambda path, w: path[-1].key in decayed, weights)

    decayed_weights = optax.add_decayed_weights(section.weight_decay, decay)
    if is_function(section.name):
        rule = _function(section.name)(config=section)
        return optax.chain(rule, decayed_weights, optax.scale_by_learning_rate(rate))
    adam = {"b1": section.beta1, "b2": section.beta2, "eps": section.epsilon}
    decoupled = {"weight_decay": section.weight_decay, "mask": decay}
    optimizers = {
        "sgd": lambda: optax.chain(decayed_weights, optax.sgd(rate, section.momentum)),
        "adam": lambda: optax.chain(decayed_weights, optax.adam(rate, **adam)),
        "adamw": lambda: optax.adamw(rate, **adam, **decoupled),
        "lamb": lambda: optax.lamb(rate, **adam, **decoupled),
        "muon": lambda: optax.partition(
            {
                "matrix": optax.contrib.muon(
                    rate,
                    beta=section.momentum,
                    weight_decay=section.weight_decay,
                    consistent_rms=0.2,
                    muon_weight_dimension_numbers=muon_matrices,
                ),
                "other": optax.adamw(rate, **adam, **decoupled),
            },
            muon_rules,
        ),
        "adafactor": lambda: optax.adafactor(section.learning_rate),
    }
    return optimizers[section.name]()


def _function(name: str) -> Callable[..., Any]:
    """A function in a file, `PATH.py:FUNCTION`."""
    path, _, function = name.rpartition(":")
    return runpy.run_path(path)[function]


MATRICES = ("qkv", "q", "k", "v", "out", "gate", "up", "down")


def muon_matrices(weights: Tree) -> Tree:
    """Inputs and outputs of the kernels of a layer; None for all other weights."""
    numbers = {
        "qkv": optax.contrib.MuonDimensionNumbers(0, (2, 3)),
        **dict.fromkeys(("q", "k", "v"), optax.contrib.MuonDimensionNumbers(0, (1, 2))),
        "out": optax.contrib.MuonDimensionNumbers((0, 1), 2),
        "gate": optax.contrib.MuonDimensionNumbers(0, 1),
        "up": optax.contrib.MuonDimensionNumbers(0, 1),
        "down": optax.contrib.MuonDimensionNumbers(0, 1),
    }

    def of(path: Any, _: Any) -> Any:
        return numbers.get(path[-2].key) if len(path) > 1 and path[-1].key == "kernel" else None

    return jax.tree_util.tree_map_with_path(of, weights)


def muon_rules(weights: Tree) -> Tree:
    """Which rule of muon changes each weight."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: (
            "matrix" if len(path) > 1 and path[-2].key in MATRICES and path[-1].key == "kernel" else "other"
        ),
        weights,
    )


_compiled: dict[Any, Callable[..., Any]] = {}


def compiled(function: Callable[..., Any], config: Config) -> Callable[..., Any]:
    """`function` of a config, compiled once for each model and seed; it may read nothing else of the config."""
    key = (function, dataclasses.astuple(config.model), config.train.seed)
    if key not in _compiled:
        _compiled[key] = jax.jit(functools.partial(function, config=copy.deepcopy(config)))
    return _compiled[key]


def gpt_loss_fn(weights: Tree, batch: Tree, number: jax.Array, config: Config) -> jax.Array:
    logits = logits_fn(weights, batch["tokens"], number, config)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], axis=-1)[..., 0]
    return -jnp.sum(picked * batch["weights"]) / jnp.sum(batch["weights"])


def logits_fn(weights: Tree, tokens: jax.Array, number: jax.Array | None, config: Config) -> jax.Array:
    """Whole logits [B, S, V]; `number` is the step for dropout, None for none.

    The head's table of tokens may be of another version than the embedding's.
    """
    table, positions = weights["embedding"]["tokens"], weights["embedding"]["positions"]
    x = drop(table[tokens] + positions[: tokens.shape[1]], 0, number, config)
    for i, w in enumerate(weights["layers"]):
        x = compiled(layer, config)(w, x, 3 * i, number)
    head = weights["head"]
    scored_by = head.get("tokens", table) if config.model.tied_embeddings else head["output"]
    return norm(head["norm"], x) @ scored_by.T


def layer(w: Tree, x: jax.Array, site: int, number: jax.Array | None, config: Config) -> jax.Array:
    y = attention(w["attention"], norm(w["attention_norm"], x), site + 1, number, config)
    x = x + drop(y, site + 2, number, config)
    return x + drop(mlp(w["mlp"], norm(w["mlp_norm"], x)), site + 3, number, config)


def attention(w: Tree, x: jax.Array, site: int, number: jax.Array | None, config: Config) -> jax.Array:
    q, k, v = (
        jnp.einsum("bsh,hnd->bnsd", x, w["qkv"]["kernel"][:, i]) + w["qkv"]["bias"][i][:, None] for i in range(3)
    )
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    length = x.shape[1]
    scores = jnp.where(np.tri(length, dtype=bool), scores, -np.inf)
    heads = drop(jax.nn.softmax(scores), site, number, config) @ v
    return jnp.einsum("bnsd,ndh->bsh", heads, w["out"]["kernel"]) + w["out"]["bias"]


def mlp(w: Tree, x: jax.Array) -> jax.Array:
    y = x @ w["up"]["kernel"] + w["up"]["bias"]
    y = 0.5 * y * (1 + jnp.tanh(jnp.sqrt(2 / jnp.pi) * (y + 0.044715 * y**3)))
    return y @ w["down"]["kernel"] + w["down"]["bias"]


def norm(w: Tree, x: jax.Array) -> jax.Array:
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(var + 1e-5) * w["scale"] + w["bias"]


def drop(x: jax.Array, site: int, number: jax.Array | None, config: Config) -> jax.Array:
    """x is [example, position or head, …]; the key path is seed → 1 → step → example → site → position or head."""
    rate = config.model.dropout
    if number is None or rate == 0:
        return x
    fold = jax.random.fold_in
    step_key = fold(fold(jax.random.key(config.train.seed), 1), number)

    def keep(example: jax.Array, row: jax.Array) -> jax.Array:
        return jax.random.bernoulli(fold(fold(fold(step_key, example), site), row), 1 - rate, x.shape[2:])

    mask = jax.vmap(jax.vmap(keep, (None, 0)), (0, None))(jnp.arange(x.shape[0]), jnp.arange(x.shape[1]))
    return x * mask / (1 - rate)
