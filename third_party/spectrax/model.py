"""A GPT-2 in plain jax as the stages of SpectraX's pipeline, which scans a schedule's table in one `shard_map`.

SpectraX's `make_scheduled_body` takes a function of a stage's parameters and activations, the same for each rank, and a
loss without parameters, and gives gradients of stages alone. So a stage here contains the embedding and the head, and
`lax.cond` runs them on the first and the last rank alone. Two more channels of the activations, [example, position,
hidden + 2], carry the tokens and the targets to the last rank, whose output has the loss of each token in channel 0.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from spectrax.runtime import schedules
from spectrax.runtime.spmd import make_scheduled_body

from third_party.protocol import Job

SCHEDULES = {"gpipe": schedules.GPipe, "1f1b": schedules.Std1F1B, "zb-h1": schedules.ZeroBubbleH1}
AXIS = "pp"

Tree = Any


def parameters(job: Job, processes: int) -> tuple[Tree, Tree]:
    """The initial weights: those of layers, stacked [rank, layer, …], and those outside of layers."""
    weights = job.weights()
    outer = {name: jnp.asarray(value) for name, value in weights.items() if ".h." not in name}
    first = "transformer.h.0."
    names = [name.removeprefix(first) for name in weights if name.startswith(first)]
    number = job.model["num_layers"]
    if number % processes:
        raise SystemExit(f"model.num_layers={number} is not a multiple of {processes} ranks, which SpectraX needs.")
    stacked = {name: np.stack([weights[f"transformer.h.{i}.{name}"] for i in range(number)]) for name in names}
    by_rank = {name: jnp.asarray(x.reshape(processes, -1, *x.shape[1:])) for name, x in stacked.items()}
    return by_rank, outer


def make_gradients(job: Job, mesh: Mesh, schedule: str, num_microbatches: int) -> Any:
    """The function from weights, tokens and targets to the mean loss and the gradients, all stages and ranks."""
    processes = mesh.shape[AXIS]
    forward = functools.partial(_stage, job.model, processes)

    def backward(weights: Tree, x: jax.Array, gradient: jax.Array) -> tuple[Tree, jax.Array]:
        return jax.vjp(forward, weights, x)[1](gradient)

    def loss_and_gradient(y: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.value_and_grad(lambda y: y[..., 0].mean())(y)

    body = make_scheduled_body(
        schedule=SCHEDULES[schedule](microbatches=num_microbatches),
        n_stages=processes,
        microbatches=num_microbatches,
        pp_axis=AXIS,
        fwd_fn=forward,
        bwd_fn=backward,
        loss_and_g_y=loss_and_gradient,
        use_scan=True,
    )
    # SpectraX' carries begin as replicated zeros, which jax's check of varying axes refuses.
    run = jax.shard_map(body, mesh=mesh, in_specs=(P(AXIS), P()), out_specs=(P(), P(AXIS)), check_vma=False)

    def gradients(weights: tuple[Tree, Tree], tokens: jax.Array, targets: jax.Array) -> tuple[jax.Array, Any]:
        layers, outer = weights
        copies = jax.tree.map(lambda x: jnp.broadcast_to(x, (processes, *x.shape)), outer)
        shape = (num_microbatches, -1, tokens.shape[-1])
        numbers = jnp.stack([tokens, targets], axis=-1).reshape(*shape, 2).astype(jnp.float32)
        empty = jnp.zeros((*numbers.shape[:-1], job.model["hidden_size"]))
        loss, (layer_grads, outer_grads) = run((layers, copies), jnp.concatenate([empty, numbers], axis=-1))
        grads = layer_grads, jax.tree.map(lambda x: x.sum(axis=0), outer_grads)
        return loss, jax.tree.map(lambda x: x / num_microbatches, grads)

    return gradients


def _stage(model: dict[str, Any], processes: int, weights: tuple[Tree, Tree], x: jax.Array) -> jax.Array:
    """A stage of activations [example, position, hidden + 2]."""
    layers, outer = weights
    rank = lax.axis_index(AXIS)
    stream, numbers = x[..., :-2], lax.stop_gradient(x[..., -2:])
    tokens, targets = (numbers[..., i].astype(jnp.int32) for i in (0, 1))
    table, positions = outer["transformer.wte.weight"], outer["transformer.wpe.weight"]
    embed = lambda: table[tokens] + positions[: tokens.shape[1]]  # noqa: E731
    stream = lax.cond(rank == 0, embed, lambda: stream)
    stream = lax.scan(lambda x, layer: (_layer(model, layer, x), None), stream, layers)[0]

    def score() -> jax.Array:
        logits = _norm(model, outer, "transformer.ln_f", stream) @ table.T
        picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        losses = jax.nn.logsumexp(logits, axis=-1) - picked
        return jnp.zeros_like(stream).at[..., 0].set(losses)

    return jnp.concatenate([lax.cond(rank == processes - 1, score, lambda: stream), numbers], axis=-1)


def _layer(model: dict[str, Any], weights: Tree, x: jax.Array) -> jax.Array:
    examples, length, hidden = x.shape
    qkv = _linear(weights, "attn.c_attn", _norm(model, weights, "ln_1", x))
    q, k, v = jnp.moveaxis(qkv.reshape(examples, length, 3, model["num_heads"], -1), 2, 0)
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(examples, length, hidden)
    x = x + _linear(weights, "attn.c_proj", mixed)
    inner = jax.nn.gelu(
        _linear(weights, "mlp.c_fc", _norm(model, weights, "ln_2", x)), approximate=model["gelu"] == "tanh"
    )
    return x + _linear(weights, "mlp.c_proj", inner)


def _linear(weights: Tree, name: str, x: jax.Array) -> jax.Array:
    return x @ weights[f"{name}.weight"] + weights[f"{name}.bias"]


def _norm(model: dict[str, Any], weights: Tree, name: str, x: jax.Array) -> jax.Array:
    centred = x - x.mean(axis=-1, keepdims=True)
    scale = lax.rsqrt(jnp.square(centred).mean(axis=-1, keepdims=True) + model["layer_norm_epsilon"])
    return centred * scale * weights[f"{name}.weight"] + weights[f"{name}.bias"]
