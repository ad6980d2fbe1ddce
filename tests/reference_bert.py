"""BERT's loss for one device, written apart from fiddlex: no mesh, no gathered positions, whole logits.

Shares with `tests/reference.py` what GPT has too, and the written definition of the dropout masks.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fiddlex.config import Config
from tests.reference import compiled, drop, mlp, norm

Tree = Any


def loss_fn(weights: Tree, batch: Tree, number: jax.Array, config: Config) -> jax.Array:
    """The mean over the batch's masked tokens, plus the mean over its labels, of what there is of these."""
    x, total = hidden_fn(weights, batch, number, config), jnp.float32(0)
    if "targets" in batch:
        logits = masked_logits_fn(weights, x, config)  # at every position
        # Each target's log-probability, found by comparing positions, so that no gather is shared with fiddlex.
        chosen = jax.nn.log_softmax(logits)[:, :, None] * jax.nn.one_hot(batch["targets"], logits.shape[-1])[:, None]
        here = batch["masked_positions"][:, None] == np.arange(x.shape[-2])[:, None]  # [example, position, masked]
        picked = jnp.where(here, chosen.sum(-1), 0).sum(1)
        total -= jnp.sum(picked * batch["weights"]) / jnp.sum(batch["weights"])
    if "labels" in batch:
        logits = label_logits_fn(weights, x, batch, number, config)
        picked = jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(batch["labels"], logits.shape[-1]), axis=-1)
        total -= jnp.sum(picked * batch["label_weights"]) / jnp.sum(batch["label_weights"])
    return total


def hidden_fn(weights: Tree, batch: Tree, number: jax.Array | None, config: Config) -> jax.Array:
    """What leaves the layers, [row, S, H]."""
    tokens, segments, types = (
        batch[name].reshape(-1, batch[name].shape[-1]) for name in ("tokens", "segments", "token_types")
    )
    post, embedding = config.model.post_norm, weights["embedding"]
    same = segments[:, :, None] == segments[:, None, :]
    # The distance from the first position of the same segment, which is how many before it are of that segment.
    places = jnp.sum(same & np.tri(tokens.shape[1], k=-1, dtype=bool), axis=-1)
    x = embedding["tokens"][tokens] + embedding["positions"][places] + embedding["token_types"][types]
    x = drop(norm(embedding["norm"], x) if post else x, 0, number, config)
    for i, w in enumerate(weights["layers"]):
        x = compiled(layer, config)(w, x, same, 3 * i, number)
    return x if post else norm(weights["head"]["norm"], x)


def layer(w: Tree, x: jax.Array, same: jax.Array, site: int, number: jax.Array | None, config: Config) -> jax.Array:
    post = config.model.post_norm
    normed = x if post else norm(w["attention_norm"], x)
    x = x + drop(attention(w["attention"], normed, same, site + 1, number, config), site + 2, number, config)
    x = norm(w["attention_norm"], x) if post else x
    normed = x if post else norm(w["mlp_norm"], x)
    x = x + drop(mlp(w["mlp"], normed), site + 3, number, config)
    return norm(w["mlp_norm"], x) if post else x


def attention(w: Tree, x: jax.Array, same: jax.Array, site: int, number: jax.Array | None, config: Config) -> jax.Array:
    q, k, v = (
        jnp.einsum("bsh,hnd->bnsd", x, w["qkv"]["kernel"][:, i]) + w["qkv"]["bias"][i][:, None] for i in range(3)
    )
    scores = jnp.where(same[:, None], q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]), -np.inf)
    heads = drop(jax.nn.softmax(scores), site, number, config) @ v
    return jnp.einsum("bnsd,ndh->bsh", heads, w["out"]["kernel"]) + w["out"]["bias"]


def masked_logits_fn(weights: Tree, x: jax.Array, config: Config) -> jax.Array:
    head = weights["head"]["masked"]
    y = x @ head["transform"]["kernel"] + head["transform"]["bias"]
    y = norm(head["norm"], 0.5 * y * (1 + jnp.tanh(jnp.sqrt(2 / jnp.pi) * (y + 0.044715 * y**3))))
    table = weights["head"].get("tokens", weights["embedding"]["tokens"])
    return y @ table.T + head["bias"][: config.model.vocab_size]


def label_logits_fn(weights: Tree, x: jax.Array, batch: Tree, number: jax.Array | None, config: Config) -> jax.Array:
    head = weights["head"]["label"]
    y = jnp.tanh(x[:, :1] @ head["pooler"]["kernel"] + head["pooler"]["bias"])
    y = drop(y, 1 + 3 * len(weights["layers"]), number, config)[:, 0]
    if "score" in head:
        return (y @ head["score"]).reshape(len(batch["labels"]), -1)
    return y @ head["classifier"]["kernel"] + head["classifier"]["bias"]
