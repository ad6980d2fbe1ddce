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
# # From model and cluster to a layout
#
# A model, so many GPUs: which mesh, which schedule, will it fit, how fast? The planner answers from arithmetic alone;
# nothing here needs a device. `experiments/plan.py` does the same on a command line.
#
# Edit the `.py` beside this notebook; the tests run it. In Colab, or any environment
# without fiddlex, install a checkout first: `pip install -e '.[notebook]'`.

# %%
# %matplotlib inline
import dataclasses

import matplotlib.pyplot as plt

from fiddlex.config import Config, DataConfig, ModelConfig, OptimizerConfig
from fiddlex.hardware.topology import load_topology
from fiddlex.planner.layouts import Problem, layouts
from fiddlex.planner.no_plan import why_none
from fiddlex.planner.plans import Plan
from fiddlex.planner.report import GIB, as_python, as_text, memory_parts
from fiddlex.planner.search import evaluate, search
from fiddlex.tools.partition import Layer, Level, pipedream

# %% [markdown]
# ## The question
#
# GPT-3's 6.7 billion parameters on 64 A100s. The config's mesh and pipeline are what we look for; all else stays.

# %%
config = Config(
    model=ModelConfig(num_layers=32, hidden_size=4096, num_heads=32, vocab_size=51200, seq_len=2048, dtype="bfloat16"),
    optimizer=OptimizerConfig(learning_rate=1.2e-4, clip_norm=1.0),
    data=DataConfig(global_batch_size=512),
)
problem = Problem(config, load_topology("a100_80"), num_devices=64)
found = search(problem)
print(as_text(problem, found))

# %% [markdown]
# Thousands of layouts, a handful of them simulated: each has a time that no order of its work could beat, and the
# search takes them in the order of that time until no further one can be among the best. The simulator then runs the
# schedule's ticks with the seconds that a layer, a hop and the head take on these chips and links.
#
# ## Where memory and time go

# %%
names = [f"{p.layout.mesh.data}×{p.layout.mesh.pipe}×{p.layout.mesh.tensor}\n{p.layout.recompute}" for p in found.plans]
figure, (memory, time) = plt.subplots(1, 2, figsize=(11, 3), layout="constrained")
parts = sorted({part for plan in found.plans for part, size in memory_parts(plan.memory).items() if size > GIB})
base = [0.0] * len(names)
for part in parts:
    sizes = [getattr(plan.memory, part) / GIB for plan in found.plans]
    memory.bar(names, sizes, bottom=base, label=part)
    base = [low + size for low, size in zip(base, sizes, strict=True)]
memory.axhline(problem.limit / GIB, color="black", linewidth=0.8)
memory.set(ylabel="GiB on each device")
memory.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
base = [0.0] * len(names)
for part in found.plans[0].exposed_s:
    shares = [plan.exposed_s[part] / plan.step_time_s for plan in found.plans]
    time.bar(names, shares, bottom=base, label=part)
    base = [low + share for low, share in zip(base, shares, strict=True)]
waits = [plan.waiting_s / plan.step_time_s for plan in found.plans]
time.bar(names, waits, bottom=base, label="waits for other ranks")
time.set(ylabel="share of the step")
time.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()

# %% [markdown]
# ## Against a layout of your own
#
# Any layout of the space can be asked for. Here all of those with a flush, whole recomputation and tensor=4: the best
# of each size of the pipe.

# %%
best: dict[int, Plan] = {}
for layout in layouts(problem):
    if (layout.semantics, layout.recompute, layout.mesh.tensor) == ("sync", "full", 4):
        plan = evaluate(problem, layout)
        if (
            plan.memory.peak <= problem.limit
            and plan.step_time_s < best.get(layout.mesh.pipe, plan).step_time_s * 1.001
        ):
            best[layout.mesh.pipe] = plan
for pipe, plan in sorted(best.items()):
    print(f"pipe={pipe}: {plan.step_time_s:.2f} s, bubble {plan.bubble:.1%}, {plan.layout.schedule}")
assert min(plan.step_time_s for plan in best.values()) >= found.plans[0].step_time_s

# %% [markdown]
# ## When nothing fits

# %%
small = dataclasses.replace(problem, num_devices=1, semantics=("sync",))
nothing = search(small)
assert not nothing.plans
assert nothing.least is not None
print(why_none(small, nothing.least))

# %% [markdown]
# ## PipeDream's own question
#
# PipeDream let stages differ in layers and in replicas. Six heavy layers with few weights, two light ones with many, on
# sixteen devices (the shape of its VGG-16): the heavy ones are replicated fifteen times, the weights of the others stay
# where they are. A transformer's layers are alike, so here even stages win.

# %%
convolutions, fully_connected = Layer(10.0, 1.0, 0.1), Layer(2.0, 1.0, 5000.0)
print(pipedream([convolutions] * 6 + [fully_connected] * 2, [Level(16, 1e3)]))

# %% [markdown]
# ## Run it
#
# A plan is a config. `experiments/plan.py --write=…` writes this file, and `experiments/compile.py` compiles it for a
# machine that is not there.

# %%
print(as_python(found.plans[0].config, "GPT-3 6.7B on 64 A100s, as planned."))
