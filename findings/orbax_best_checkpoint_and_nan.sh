#!/usr/bin/env bash
# One would guess: a CheckpointManager with best_fn and max_to_keep keeps the checkpoints of the best metrics, and a
#   step whose loss is NaN counts as the worst.
# Seen (orbax-checkpoint 0.12.8, jax 0.10.2, CPU, 2026-11-27): a NaN breaks the order. Of the losses 3, 2, 1, NaN, 5
#   with best_mode="min" and two to keep, the checkpoints of NaN and 5 stay, that of 1 is deleted, and best_step() is
#   that of 5.
# Where it bites: one evaluation that gives NaN, and the best model is gone from the disk. best_fn has to give a number
#   for NaN, such as infinity.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q jax==0.10.2 orbax-checkpoint==0.12.8
JAX_PLATFORMS=cpu "$folder/env/bin/python" - "$folder" 2>"$folder/log" <<'PY'
import math
import sys

import jax.numpy as jnp
import orbax.checkpoint as ocp

losses = (3.0, 2.0, 1.0, math.nan, 5.0)


def kept(name, best_fn):
    options = ocp.CheckpointManagerOptions(max_to_keep=2, best_fn=best_fn, best_mode="min")
    with ocp.CheckpointManager(f"{sys.argv[1]}/{name}", options=options) as manager:
        for step, loss in enumerate(losses):
            manager.save(step, args=ocp.args.StandardSave({"x": jnp.ones(1)}), metrics={"loss": loss})
            manager.wait_until_finished()
        print(f"{name}: kept {[losses[step] for step in manager.all_steps()]}, best {losses[manager.best_step()]}")
        return list(manager.all_steps()), manager.best_step()


assert kept("loss", lambda metrics: metrics["loss"]) == ([3, 4], 4)
infinite = lambda metrics: math.inf if math.isnan(metrics["loss"]) else metrics["loss"]
assert kept("loss, infinite for NaN", infinite) == ([1, 2], 2)
PY
