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
# # A pipeline schedule of your own
#
# A schedule is data: for each rank an ordered list of actions. Here we type one in, break it, mend it, draw it and
# find out what it costs, all without compiling anything; then we write one as a function, and train with it.
#
# Edit the `.py` beside this notebook; the tests run it. In Colab, or any environment
# without fiddlex, install a checkout first: `pip install -e '.[notebook]'`.

# %%
# %matplotlib inline
import dataclasses
import pathlib
import tempfile

import numpy as np

from fiddlex.config import Config, DataConfig, MeshConfig, ModelConfig, PipelineConfig
from fiddlex.errors import ScheduleError
from fiddlex.schedules.generators import GENERATORS, make_schedule
from fiddlex.schedules.lowering import lower
from fiddlex.schedules.schedule import Action, Kind, Schedule, alternate
from fiddlex.schedules.text import from_csv, order_to_text, to_csv, to_text
from fiddlex.schedules.ticks import moved_ahead
from fiddlex.schedules.validate import validate
from fiddlex.simulate.clock import Costs, free_running
from fiddlex.simulate.lockstep import lockstep
from fiddlex.simulate.plots import draw
from fiddlex.simulate.timeline import Timeline
from fiddlex.train.trainer import Trainer

# %% [markdown]
# ## Build
#
# `2F0` is stage 2, forward, microbatch 0; `B` is the backward pass. A row belongs to a rank, which runs its actions in
# this order and waits where what it needs is not there yet. These are three ranks with a stage each, and four
# microbatches: 1F1B, typed in.

# %%
table = """\
0F0,0F1,0F2,0B0,0F3,0B1,0B2,0B3
1F0,1F1,1B0,1F2,1B1,1F3,1B2,1B3
2F0,2B0,2F1,2B1,2F2,2B2,2F3,2B3
"""
typed = validate(from_csv(table, "typed"))
assert typed.actions == make_schedule("1f1b", pipe=3, num_microbatches=4).actions
print(to_text(typed))

# %% [markdown]
# ## Break
#
# Rank 1 now wants its first gradient before it takes its second forward, and rank 2 wants that forward before it gives
# the gradient. The validator says who waits for whom, marks them in the grid, and says what would help.

# %%
broken = from_csv(table.replace("1F0,1F1,1B0", "1F0,1B0,1F1").replace("2F0,2B0,2F1", "2F0,2F1,2B0"), "broken")
try:
    validate(broken)
except ScheduleError as error:
    print(error)

# %% [markdown]
# A backward pass that is missing is marked where it should have been:

# %%
try:
    validate(from_csv(table.replace(",2B3", ""), "forgetful"))
except ScheduleError as error:
    print(error)

# %% [markdown]
# ## Repair
#
# One of the two remedies is enough. Rank 2 still takes its second forward early, which is legal.

# %%
mended = validate(from_csv(table.replace("2F0,2B0,2F1", "2F0,2F1,2B0"), "mended"))
print(to_text(mended))

# %% [markdown]
# ## Draw, and count the cost
#
# Two clocks read a schedule. *Free-running* is that of the papers: a rank starts an action as soon as it can.
# *Lockstep* is what the executor pays: all ranks step together through the ticks of one table, a forward and a backward
# at most in each. Below each are the activations that the ranks hold meanwhile. A bubble is the time of a batch beyond
# the work of the busiest rank, divided by that work. Free-running, the time of a batch is the longest from a rank's
# first action to its last; in lockstep it is the makespan.


# %%
def clocks(schedule: Schedule, costs: Costs) -> dict[str, Timeline]:
    """Both timelines, by name."""
    return {"free-running": free_running(schedule, costs), "lockstep": lockstep(lower(schedule), costs)}


units = Costs()  # F, I and W take 1 each, so B takes 2; hops are free
draw(clocks(typed, units))

# %%
for name, timeline in clocks(typed, units).items():
    bubble = timeline.bubble_fraction
    print(f"{name:12} makespan {timeline.makespan:g}  bubble {bubble:.0%}  held {timeline.peak_inflight}")
    assert bubble == (timeline.batch_time - timeline.ideal) / timeline.ideal == (3 - 1) / 4  # (p−1)/m

# %% [markdown]
# The ticks themselves, with the actions that share one joined by `+`. Forwards may run ahead of backwards here, as a
# round trip through the pipe takes twice as many ticks as ranks. So this is no longer quite the order that was typed
# in, and rank 0 holds more; `order_to_text` tells what was moved, as the commands and the log of a run do.

# %%
print(to_text(typed, lower(typed).ticks))
print(order_to_text(lower(typed), "pipeline.order"))
print({rank: " ".join(map(str, moved.forwards)) for rank, moved in moved_ahead(typed, lower(typed).ticks).items()})

# %% [markdown]
# In strict order each rank runs one action a tick, as it stands in the table, and holds what the table says. A schedule
# in a file, a table or a function, runs so unless `pipeline.order=ahead` says otherwise; a name runs ahead unless
# `pipeline.order=strict` does.

# %%
strict = dataclasses.replace(typed, strict=True)
print(to_text(strict, lower(strict).ticks))
for name, timeline in clocks(strict, units).items():
    print(f"{name:12} makespan {timeline.makespan:g}  held {timeline.peak_inflight}")
assert not moved_ahead(strict, lower(strict).ticks)

# %% [markdown]
# ## Write one as a function
#
# Hops take time. In 1F1B every microbatch in flight is waited for, so a free-running rank stalls for each hop. This
# variant runs twice as many forwards ahead, so that a gradient has time to travel. It gives each rank's order and each
# stage's rank; `make_schedule` proves it legal. Here in the notebook it gets a name, under which it runs ahead. In a
# file, say `mine.py`, it needs none: `mine.py:eager_1f1b` is taken wherever a name is.


# %%
def eager_1f1b(*, pipe: int, chunks: int = 1, num_microbatches: int) -> Schedule:
    """1F1B with twice the warm-up."""
    rows = []
    for rank in range(pipe):
        forwards, backwards = ([Action(rank, kind, k) for k in range(num_microbatches)] for kind in (Kind.F, Kind.B))
        rows.append(tuple(alternate(forwards, backwards, warmup=2 * (pipe - rank - 1))))
    return Schedule("eager_1f1b", tuple(rows), placement=tuple(range(pipe)))


GENERATORS["eager_1f1b"] = eager_1f1b
mine = make_schedule("eager_1f1b", pipe=4, num_microbatches=12)
plain = make_schedule("1f1b", pipe=4, num_microbatches=12)

# %% [markdown]
# With hops of half a forward it is faster than 1F1B free-running, and holds more for it. In lockstep both are the same:
# a tick hides its hops beside its work, and 1F1B already runs as far ahead.

# %%
slow_hops = Costs(hop=0.5)
for schedule in (plain, mine):
    for name, timeline in clocks(schedule, slow_hops).items():
        print(f"{schedule.name:10} {name:12} bubble {timeline.bubble_fraction:6.1%}  held {timeline.peak_inflight}")

# %%
draw({schedule.name: free_running(schedule, slow_hops) for schedule in (plain, mine)})

# %% [markdown]
# Memory can be counted in bytes, too, as a curve of times and amounts: here 3 GB for the activations of a stage.

# %%
print(free_running(mine, slow_hops).memory(0, activation=3e9)[:4])

# %% [markdown]
# ## Run it
#
# The executor scans the table that `lower` makes and knows no schedule by name, so this one trains like any other: here
# a small GPT on four fake devices, a layer each, beside zero-bubble and one device alone. Dropout is on; the losses
# agree to rounding.


# %%
def losses(schedule: str, pipe: int) -> list[float]:
    config = Config(
        model=ModelConfig(num_layers=4, hidden_size=32, seq_len=32, dropout=0.1),
        mesh=MeshConfig(pipe=pipe),
        pipeline=PipelineConfig(schedule=schedule, num_microbatches=12),
        data=DataConfig(global_batch_size=24),
    )
    return [record["loss"] for record in Trainer(config).steps(5)]


in_a_pipe = {schedule: losses(schedule, pipe=4) for schedule in ("eager_1f1b", "zb_h1")}
alone = losses("1f1b", pipe=1)
for name, values in in_a_pipe.items():
    print(f"{name:10}", np.round(values, 5))
    np.testing.assert_allclose(values, alone, rtol=1e-5)

# %% [markdown]
# ## Take it along
#
# A table in a file is a schedule like any other: for `experiments/schedule.py --name=file:mine.csv`, which prints,
# checks and draws it, and for whoever reads the same text form. A run keeps the table of its schedule in its workdir,
# as `schedule.csv`, so that it can be evaluated where nobody has registered the name.

# %%
with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / "mine.csv"
    path.write_text(to_csv(mine))
    assert make_schedule(f"file:{path}").actions == mine.actions
