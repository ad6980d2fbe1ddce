"""A trainer for one device, written apart from fiddlex: no mesh, no NNX, no scan, whole logits, `jax.grad`.

It shares with fiddlex only the names in the weights dictionary and the written definition of the dropout masks
(`fiddlex/models/dropout.py`: which key belongs to which element). Layers are unstacked before the optimizer sees them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fiddlex.config import Config

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
    """Losses, gradient norms, first gradient and final weights of plain training on `batches`, by default of a GPT.

    `delays` of the number of a step: the gradient is taken at W(step − delay), or W(0) before there is such, and
    applied to the newest weights.
    """
    weights = unstack(weights)
    history = [weights]
    optimizer = make_optimizer(config)
    state = jax.jit(optimizer.init)(weights)
    losses, norms, first_grads = [], [], None
    gradient = _gradient(loss_fn or gpt_loss_fn, config)

    @jax.jit
    def update(weights: Tree, state: Tree, grads: Tree) -> Any:
        updates, state = optimizer.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state

    for number, batch in enumerate(batches):
        lag = delays(number) if delays else Delays(0, (0,) * len(weights["layers"]), 0)
        embedding, head, *layers = (history[max(number - d, 0)] for d in (lag.embedding, lag.head, *lag.layers))
        stale = {
            "embedding": embedding["embedding"],
            "layers": [version["layers"][i] for i, version in enumerate(layers)],
            "head": head["head"] | {"tokens": head["embedding"]["tokens"]},
        }
        loss, norm, grads = gradient(stale, batch, jnp.int32(number))
        weights, state = update(weights, state, grads)
        history.append(weights)
        first_grads = grads if first_grads is None else first_grads
        losses.append(float(loss))
        norms.append(float(norm))
    return {"losses": losses, "norms": norms, "grads": first_grads, "weights": weights}


_gradients: dict[Any, Callable[..., Any]] = {}


def _gradient(loss_fn: Callable[[Tree, Tree, jax.Array, Config], jax.Array], config: Config) -> Callable[..., Any]:
    """Loss, global gradient norm and gradients, compiled once for all runs whose model and seed are the same."""
    key = (loss_fn, dataclasses.astuple(config.model), config.train.seed)

    @jax.jit
    def gradient(weights: Tree, batch: Tree, number: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(weights, batch, number, config)
        grads["embedding"]["tokens"] += grads["head"].pop("tokens")  # they are tied
        return loss, jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))), grads

    return _gradients.setdefault(key, gradient)


def make_optimizer(config: Config) -> optax.GradientTransformation:
    section = config.optimizer
    rate = optax.constant_schedule(section.learning_rate)
    decayed = {
        "kernel",
        "tokens",
        "positions",
        "token_types",
        "score",
    }  # names of the matrices; norms and biases are left alone

    def decay(weights: Tree) -> Tree:
        return jax.tree_util.tree_map_with_path(lambda path, w: path[-1].key in decayed, weights)

    clip = optax.clip_by_global_norm(section.clip_norm) if section.clip_norm else optax.identity()
    decayed_weights = optax.add_decayed_weights(section.weight_decay, decay)
    adam = {"b1": section.beta1, "b2": section.beta2, "eps": section.epsilon}
    decoupled = {"weight_decay": section.weight_decay, "mask": decay}
    optimizers = {
        "sgd": lambda: optax.chain(decayed_weights, optax.sgd(rate, section.momentum)),
        "adam": lambda: optax.chain(decayed_weights, optax.adam(rate, **adam)),
        "adamw": lambda: optax.adamw(rate, **adam, **decoupled),
        "lamb": lambda: optax.lamb(rate, **adam, **decoupled),
        "adafactor": lambda: optax.adafactor(section.learning_rate),
    }
    return optax.chain(clip, optimizers[section.name]())


def gpt_loss_fn(weights: Tree, batch: Tree, number: jax.Array, config: Config) -> jax.Array:
    logits = logits_fn(weights, batch["tokens"], number, config)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], axis=-1)[..., 0]
    return -jnp.sum(picked * batch["weights"]) / jnp.sum(batch["weights"])


def logits_fn(weights: Tree, tokens: jax.Array, number: jax.Array | None, config: Config) -> jax.Array:
    """Whole logits [B, S, V]; `number` is the step for dropout, None for none. A head may have its own token table."""
    table, positions = weights["embedding"]["tokens"], weights["embedding"]["positions"]
    x = drop(table[tokens] + positions[: tokens.shape[1]], 0, number, config)
    for i, layer in enumerate(weights["layers"]):
        y = attention(layer["attention"], norm(layer["attention_norm"], x), 1 + 3 * i, number, config)
        x = x + drop(y, 2 + 3 * i, number, config)
        x = x + drop(mlp(layer["mlp"], norm(layer["mlp_norm"], x)), 3 + 3 * i, number, config)
    return norm(weights["head"]["norm"], x) @ weights["head"].get("tokens", table).T


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
