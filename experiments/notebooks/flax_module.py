# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Your Flax module in a pipeline
#
# Three modules of `flax.nnx` that know nothing of devices train on a pipeline of two ranks, with two tensor ranks each,
# and give the losses of a plain loop on one device. [docs/flax.md](../../docs/flax.md) has the rules.
#
# Edit the `.py` beside this notebook; the tests run it.

# %%
import functools
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from fiddlex.cluster.mesh import request_devices
from fiddlex.config import Config, DataConfig, MeshConfig, ModelConfig, OptimizerConfig, PipelineConfig
from fiddlex.config.families import FAMILIES
from fiddlex.costs.backend import CPU
from fiddlex.costs.sizes import model_flops, num_parameters
from fiddlex.data.loader import Loader
from fiddlex.flax import family
from fiddlex.models.registry import network_of
from fiddlex.planner.predict import needed_memory
from fiddlex.train.trainer import Trainer

# %% [markdown]
# Fake devices can be made only before jax starts. The first line keeps to the CPU where there is one accelerator.

# %%
jax.config.update("jax_platforms", "cpu")
request_devices(4)
print(jax.devices())

# %% [markdown]
# ## Three modules
#
# One embeds, one is a layer, one scores. Each is made from `config.model`. This layer is a recurrence with a gate: no
# attention, nothing that fiddlex has.


# %%
class Embed(nnx.Module):
    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.table = nnx.Embed(config.vocab_size, config.hidden_size, dtype=config.dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.table(tokens)


class Block(nnx.Module):
    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        hidden, units = config.hidden_size, config.mlp_size
        self.norm = nnx.RMSNorm(hidden, rngs=rngs)
        self.value, self.gate = nnx.Linear(hidden, units, rngs=rngs), nnx.Linear(hidden, units, rngs=rngs)
        self.down = nnx.Linear(units, hidden, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.norm(x)
        decay, value = nnx.sigmoid(self.gate(y)), self.value(y)

        def step(state: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            decay, value = now
            state = decay * state + (1 - decay) * value
            return state, state

        times = jnp.swapaxes(decay, 0, 1), jnp.swapaxes(value, 0, 1)
        _, states = jax.lax.scan(step, jnp.zeros_like(value[:, 0]), times)
        return x + self.down(nnx.silu(jnp.swapaxes(states, 0, 1)))


class Head(nnx.Module):
    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(config.hidden_size, rngs=rngs)

    def __call__(self, x: jax.Array, embed: Embed) -> jax.Array:
        return embed.table.attend(self.norm(x))


FAMILIES["recurrent"] = family(embed=Embed, block=Block, head=Head)

# %% [markdown]
# ## What fiddlex sees
#
# It traces the layer. Parameters, flops and memory follow, and so does what two tensor ranks share: the number after a
# weight is the dimension of which each has a half.

# %%
config = Config(
    model=ModelConfig(family="recurrent", num_layers=4, hidden_size=64, vocab_size=257, seq_len=64),
    mesh=MeshConfig(pipe=2, tensor=2),
    pipeline=PipelineConfig(schedule="1f1b", num_microbatches=4),
    optimizer=OptimizerConfig(name="adamw", schedule="constant", warmup_steps=0, clip_norm=0.0),
    data=DataConfig(global_batch_size=16),
).validate()
print(f"{num_parameters(config):,} parameters, {model_flops(config):.3g} flops in a step")
print(f"{needed_memory(config, CPU).peak / 2**20:.1f} MiB on a device")
for path, weight in jax.tree_util.tree_leaves_with_path(network_of(config).layer):
    shared = [dimension for dimension, axis in enumerate(weight.axes) if axis]
    print(jax.tree_util.keystr(path, simple=True, separator="."), weight.shape, *shared)

# %% [markdown]
# ## On four devices
#
# 1F1B on two pipeline ranks, each of two tensor ranks. The memory does not grow with the number of microbatches.

# %%
trainer = Trainer(config)
first = trainer.weights()
losses = [record["loss"] for record in trainer.steps(10)]
print(f"{losses[0]:.4f} -> {losses[-1]:.4f}")

# %% [markdown]
# ## On one device, by a plain loop
#
# The same modules with the same first weights, whose names are those of the modules, on the same batches.


# %%
def module(kind: Callable, weights: dict) -> nnx.Module:
    made = kind(config.model, rngs=nnx.Rngs(0))
    nnx.update(made, weights)
    return made


def loss(weights: dict, batch: dict) -> jax.Array:
    embed = module(Embed, weights["embedding"])
    x = embed(batch["tokens"])
    for number in range(config.model.num_layers):
        x = module(Block, jax.tree.map(operator.itemgetter(number), weights["layers"]))(x)
    logits = module(Head, weights["head"])(x, embed)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


optimizer = optax.adamw(1e-3, b2=0.95, weight_decay=0.0)
loader = Loader(trainer.dataset.train, global_batch_size=16, seed=config.data.seed, vocab_size=257)
weights = jax.tree.map(jnp.asarray, first)
state = optimizer.init(weights)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def step(weights: dict, state: optax.OptState, batch: dict) -> tuple:
    value, gradients = jax.value_and_grad(loss)(weights, batch)
    updates, state = optimizer.update(gradients, state, weights)
    return optax.apply_updates(weights, updates), state, value


plain = []
for number in range(10):
    weights, state, value = step(weights, state, loader.batch(number))
    plain.append(float(value))
print("largest difference of the losses:", f"{max(abs(a - b) for a, b in zip(losses, plain, strict=True)):.1e}")
assert max(abs(a - b) for a, b in zip(losses, plain, strict=True)) < 1e-4

# %% [markdown]
# ## From here
#
# A config file that registers the family trains with `fiddlex train --config=FILE.py`, and `fiddlex plan` finds a
# layout for a cluster: [experiments/flax_tiny.py](../flax_tiny.py) is one. Other schedules and delayed weights are
# fields of the config:

# %%
config.pipeline = PipelineConfig(schedule="zb_h1", num_microbatches=8, semantics="2bw")
print([round(record["loss"], 4) for record in Trainer(config).steps(10)][-1])
