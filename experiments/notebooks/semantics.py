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
# # Weights one update old
#
# A pipeline that is flushed after each batch idles while it drains and fills again. 2BW (Narayanan et al., ICML 2021)
# never drains: the next batch starts while the last one is still on its way back, with weights that are one update old.
# Here we look at that pipeline, check what it computes against four lines of a reference, and compare what it learns.
#
# Edit the `.py` beside this notebook; the tests run it. In Colab, or any environment
# without fiddlex, install a checkout first: `pip install -e '.[notebook]'`.

# %%
# %matplotlib inline
import copy
import pathlib
import tempfile

import jax
import matplotlib.pyplot as plt
import numpy as np

from fiddlex.cluster.mesh import make_mesh
from fiddlex.config import Config, DataConfig, MeshConfig, ModelConfig, OptimizerConfig, PipelineConfig, TrainConfig
from fiddlex.data import Loader
from fiddlex.schedules.generators import make_schedule
from fiddlex.schedules.schedule import Schedule
from fiddlex.schedules.semantics import make_semantics
from fiddlex.schedules.windows import unroll
from fiddlex.simulate.clock import Costs
from fiddlex.simulate.plots import draw
from fiddlex.simulate.steady import first_steps, steady
from fiddlex.train.step.flushed import make_gradients
from fiddlex.train.step.program import Program
from fiddlex.train.trainer import Trainer

# %% [markdown]
# ## The pipeline
#
# Four ranks, six microbatches in a batch. `unroll` runs a schedule over batch after batch and cuts it into *windows*,
# one for each train step: a window ends when the last gradient of its batch exists. Shades are versions of
# the weights. With a flush all work of a batch has one shade; under 2BW two versions are in use at once.


# %%
def one_forward_one_backward(num_microbatches: int) -> Schedule:
    return make_schedule("1f1b", pipe=4, num_microbatches=num_microbatches)


windows = {
    name: unroll(
        one_forward_one_backward(6), make_semantics(name, num_stages=4, batch_size=6), one_forward_one_backward
    )
    for name in ("sync", "2bw")
}
draw(
    {name: first_steps(each, 3, Costs()) for name, each in windows.items()},
    {name: each.semantics for name, each in windows.items()},
)

# %% [markdown]
# The first window fills the pipeline; from the second on no rank is ever idle.

# %%
for name, each in windows.items():
    facts = steady(each, Costs())
    print(f"{name}: {facts.fill_ticks} ticks for the first batch, then {facts.period_ticks:g}; {facts.period:g} long")
assert steady(windows["2bw"], Costs()).period == 6 * 3  # six microbatches of F + B, and no bubble

# %% [markdown]
# ## Staleness
#
# Train on one batch over and over. With a flush the losses are L(W₀), L(W₁), L(W₂) …; under 2BW they must be L(W₀),
# L(W₀), L(W₁), since batch t is run with W(t − 1), and there is nothing older than W₀.

# %%
config = Config(
    model=ModelConfig(num_layers=4, hidden_size=32, num_heads=2, vocab_size=256, seq_len=32),
    mesh=MeshConfig(pipe=2),
    pipeline=PipelineConfig(num_microbatches=4, semantics="2bw"),
    optimizer=OptimizerConfig(name="sgd", momentum=0.0, learning_rate=0.5, schedule="constant", clip_norm=1.0),
    data=DataConfig(source="stdlib", global_batch_size=8, eval_batches=8),
    train=TrainConfig(num_steps=12),
)
one_batch = pathlib.Path(tempfile.mkdtemp()) / "one_batch.txt"
one_batch.write_text(pathlib.Path(tempfile.__file__).read_text()[: 8 * 32 + 1])  # eight examples, each with its target
repeating = copy.deepcopy(config)
repeating.data = DataConfig(source=f"text:{one_batch}", global_batch_size=8, eval_fraction=0.0)
losses = [record["loss"] for record in Trainer(repeating).steps(5)]
print([round(loss, 4) for loss in losses])
np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)
assert losses[1] > losses[2] > losses[3]

# %% [markdown]
# ## The oracle
#
# What 2BW computes takes a few lines: the gradient at the weights before the newest, applied to the newest. A trainer
# of one device gives the gradient, `tests/reference.py` has the same for every semantics and optimizer without any of
# fiddlex in it. Clipping is by the norm of the whole gradient, and plain SGD keeps the update on one line.

# %%
piped = Trainer(config)
loader = Loader(piped.dataset.train, global_batch_size=8, seed=0, vocab_size=256)

single = copy.deepcopy(config)
single.mesh.pipe, single.pipeline.num_microbatches, single.pipeline.semantics = 1, 1, "sync"
plain = Program(single, make_mesh(single.mesh))
value_and_grad = jax.jit(make_gradients(plain.model, plain.config, plain.mesh, plain.layout))

weights, oracle_losses = [plain.init_state().weights], []
for step in range(6):
    stale = weights[max(step - 1, 0)]  # W(t − 1)
    loss, grads = value_and_grad(stale, loader.batch(step), np.int32(step), np.float32(1))
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(grads)))
    scale = config.optimizer.learning_rate * min(1.0, config.optimizer.clip_norm / norm)
    weights.append(jax.tree.map(lambda w, g, scale=scale: w - scale * g, weights[-1], grads))  # applied to W(t)
    oracle_losses.append(float(loss))

np.testing.assert_allclose([record["loss"] for record in piped.steps(6)], oracle_losses, rtol=1e-5)
print("the pipeline's losses are the oracle's:", [round(loss, 4) for loss in oracle_losses])

# %% [markdown]
# ## The curves
#
# Does one update of delay cost anything? A small model for a short while, with a flush, with 2BW, with PipeDream's
# weight stashing (with two stages, weights one update and none behind), and with 2BW after a start that is synchronous.
# At so high a rate it costs some hundredths of a nat, and which of the delayed ones comes out best after 60 steps of
# one seed is chance. `experiments/quality.py` asks the question with more models, steps and seeds; its answer stands in
# docs/semantics.md.

# %%
curves = {}
for name, schedule in {"sync": "sync", "2bw": "2bw", "stash": "stash", "sync, then 2bw": "sync:0.2,2bw"}.items():
    config = copy.deepcopy(config)
    config.optimizer = OptimizerConfig(learning_rate=3e-3, warmup_steps=10, clip_norm=1.0)
    config.pipeline.semantics, config.pipeline.semantics_schedule = "sync", schedule
    config.train.num_steps = 60
    trainer = Trainer(config)
    curves[name] = [record["loss"] for record in trainer.steps(60)]
    print(f"{name}: held-out loss {trainer.evaluate()['eval_loss']:.3f}")

figure, axes = plt.subplots(figsize=(6, 3))
for name, curve in curves.items():
    axes.plot(curve, label=name, linewidth=1)
axes.set(xlabel="step", ylabel="loss, nats per byte")
axes.legend(frameon=False)
plt.show()
