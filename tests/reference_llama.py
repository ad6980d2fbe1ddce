"""The loss of a Llama-type decoder on one device, written apart from fiddlex; `reference.train` trains with it.

Rotary positions turn complex numbers, and each head of queries has its own copy of the keys and values that it shares.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fiddlex.config import Config
from tests.reference import Tree, compiled, drop


def loss_fn(weights: Tree, batch: Tree, number: jax.Array, config: Config) -> jax.Array:
    logits = logits_fn(weights, batch["tokens"], number, config)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], axis=-1)[..., 0]
    return -jnp.sum(picked * batch["weights"]) / jnp.sum(batch["weights"])


def logits_fn(weights: Tree, tokens: jax.Array, number: jax.Array | None, config: Config) -> jax.Array:
    """Whole logits [B, S, V]; `number` is the step for dropout, None for none."""
    table = weights["embedding"]["tokens"]
    x = drop(table[tokens], 0, number, config)
    for i, w in enumerate(weights["layers"]):
        x = compiled(layer, config)(w, x, 3 * i, number)
    head = weights["head"]
    scored_by = head.get("tokens", table) if config.model.tied_embeddings else head["output"]
    return norm(head["norm"], x, config) @ scored_by.T


def layer(w: Tree, x: jax.Array, site: int, number: jax.Array | None, config: Config) -> jax.Array:
    y = attention(w["attention"], norm(w["attention_norm"], x, config), site + 1, number, config)
    x = x + drop(y, site + 2, number, config)
    y = norm(w["mlp_norm"], x, config)
    gate, value = y @ w["mlp"]["gate"]["kernel"], y @ w["mlp"]["up"]["kernel"]
    return x + drop((gate / (1 + jnp.exp(-gate)) * value) @ w["mlp"]["down"]["kernel"], site + 3, number, config)


def attention(w: Tree, x: jax.Array, site: int, number: jax.Array | None, config: Config) -> jax.Array:
    q, k, v = (jnp.einsum("bsh,hnd->bnsd", x, w[name]["kernel"]) for name in ("q", "k", "v"))
    if config.model.qkv_bias:
        q, k, v = (x + w[name]["bias"][:, None] for name, x in zip("qkv", (q, k, v), strict=True))
    if config.model.qk_norm:
        q, k = norm(w["q_norm"], q, config), norm(w["k_norm"], k, config)
    q, k = turned(q, config), turned(k, config)
    k, v = (jnp.repeat(each, q.shape[1] // k.shape[1], axis=1) for each in (k, v))
    scores = jnp.where(np.tri(x.shape[1], dtype=bool), q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]), -np.inf)
    heads = drop(jax.nn.softmax(scores), site, number, config) @ v
    return jnp.einsum("bnsd,ndh->bsh", heads, w["out"]["kernel"])


def norm(w: Tree, x: jax.Array, config: Config) -> jax.Array:
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + config.model.layer_norm_epsilon) * w["scale"]


def turned(x: jax.Array, config: Config) -> jax.Array:
    """Pairs (element i, element i + d/2) as complex numbers, times e^(i · position · angle)."""
    half = x.shape[-1] // 2
    turns = np.exp(1j * np.outer(np.arange(x.shape[-2]), angles(config.model, half))).astype(np.complex64)
    y = (x[..., :half] + 1j * x[..., half:]) * turns
    return jnp.concatenate([y.real, y.imag], axis=-1)


def angles(model: Any, half: int) -> np.ndarray:
    """As the code that Meta published with Llama 3.1 has it, one wavelength at a time."""
    found = []
    for i in range(half):
        angle = model.rope_base ** (-i / half)
        wavelength = 2 * np.pi / angle
        if model.rope_scaling == "linear":
            angle /= model.rope_factor
        if model.rope_scaling == "llama3":
            longest, shortest = (
                model.rope_original_len / each for each in (model.rope_low_frequency, model.rope_high_frequency)
            )
            if wavelength > longest:
                angle /= model.rope_factor
            elif wavelength > shortest:
                smooth = (model.rope_original_len / wavelength - model.rope_low_frequency) / (
                    model.rope_high_frequency - model.rope_low_frequency
                )
                angle = (1 - smooth) * angle / model.rope_factor + smooth * angle
        found.append(angle)
    return np.array(found)
