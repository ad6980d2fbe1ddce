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
# # Train a small GPT, and look inside
#
# A byte-level GPT learns the source code of Python's standard library on four devices. On a CPU the devices are made
# up; the program is the one that would run on real ones. Edit the `.py` beside this notebook; the tests run it.
#
# In Colab, or any environment without fiddlex, install a checkout first: `pip install -e '.[notebook]'`.

# %%
import dataclasses
import math

import jax
import matplotlib.pyplot as plt
import numpy as np

from fiddlex.cluster.mesh import describe, request_devices
from fiddlex.config import Config, DataConfig, MeshConfig, ModelConfig, OptimizerConfig
from fiddlex.costs.sizes import model_flops, num_parameters
from fiddlex.train.inference.sampling import SamplingConfig
from fiddlex.train.trainer import Trainer

# %% [markdown]
# Fake devices can be made only before jax starts. A Trainer asks for as many as its mesh needs; we ask here, so that
# the order of the trainers below does not matter. The first line keeps to the CPU where there is one accelerator, as
# in Colab; with four of them, leave both out.

# %%
jax.config.update("jax_platforms", "cpu")
request_devices(4)

# %% [markdown]
# ## A config is typed data
#
# Every field has a default and checks itself. The mesh has three axes: `data` replicates the model, `tensor` cuts every
# layer in pieces, and `pipe` will hold different layers on different devices.

# %%
config = Config(
    model=ModelConfig(num_layers=2, hidden_size=64, num_heads=4, vocab_size=256, seq_len=64),
    mesh=MeshConfig(data=2, tensor=2),
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=10, clip_norm=1.0, weight_decay=0.1),
    data=DataConfig(source="stdlib", global_batch_size=16, eval_batches=8),
)
config.train.num_steps = 100
print(f"{num_parameters(config):,} parameters")
print(f"{model_flops(config) / 1e9:.2f} Gflop in a step")

# %% [markdown]
# A mistake gets an answer before anything is compiled:

# %%
config.mesh.tensor = 3
try:
    config.validate()
except ValueError as error:
    print(error)
config.mesh.tensor = 2

# %% [markdown]
# ## A Trainer brings it to life
#
# It keeps the config it was made with. To change something, build another.

# %%
trainer = Trainer(config)
print(describe(trainer.mesh))
print(trainer.dataset.description)

# %%
losses = [record["loss"] for record in trainer.steps(config.train.num_steps)]

# %%
plt.figure(figsize=(6, 3))
plt.plot(losses, label="training")
plt.axhline(math.log(256), linestyle=":", color="gray", label="knowing nothing: ln 256")
plt.axhline(trainer.evaluate()["eval_loss"], linestyle="--", color="tab:orange", label="held out, at the end")
plt.xlabel("step")
plt.ylabel("nats per byte")
plt.legend()
plt.show()

# %% [markdown]
# What it has learnt so far. (`experiments/train.py --config=configs/gpt_tiny.py` trains a larger one for longer.)

# %%
print("".join(trainer.generate("def ", 120, SamplingConfig(temperature=0.7))))

# %% [markdown]
# ## The weights
#
# `weights()` gives plain numpy arrays, whole, whatever the mesh. Layers are stacked along the first dimension.

# %%
weights = trainer.weights()
print(jax.tree.map(np.shape, weights["layers"]["attention"]))
assert sum(leaf.size for leaf in jax.tree.leaves(weights)) == num_parameters(config)

# %% [markdown]
# How alike are two bytes to the model? The cosine of their embeddings, after this short training. Train longer
# (`config.train.num_steps`) and watch the digits, the capitals and the small letters draw together.

# %%
printable = np.arange(33, 127)
table = weights["embedding"]["tokens"][printable]
table = table / np.linalg.norm(table, axis=1, keepdims=True)
plt.figure(figsize=(5, 4.2))
plt.imshow(table @ table.T, cmap="coolwarm", vmin=-1, vmax=1)
plt.colorbar(label="cosine")
ticks = [printable.tolist().index(ord(character)) for character in "09AZaz"]
plt.xticks(ticks, list("09AZaz"))
plt.yticks(ticks, list("09AZaz"))
plt.show()

# %% [markdown]
# ## The layout changes the speed and nothing else
#
# The same seed gives the same weights and the same order of data on every mesh, so the first steps agree to rounding.

# %%
first_losses = {}
for data, tensor in [(2, 2), (1, 1)]:
    changed = dataclasses.replace(config, mesh=MeshConfig(data=data, tensor=tensor))
    first_losses[data, tensor] = [record["loss"] for record in Trainer(changed).steps(5)]
    print(f"data={data} tensor={tensor}:", np.round(first_losses[data, tensor], 5))
np.testing.assert_allclose(first_losses[2, 2], first_losses[1, 1], rtol=1e-5)
