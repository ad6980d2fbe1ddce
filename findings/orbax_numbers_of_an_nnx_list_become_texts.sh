#!/usr/bin/env bash
# One would guess: what `nnx.to_pure_dict` gives, saved by orbax and restored without a template, goes back into the
#   module with `nnx.update`.
# Seen (flax 0.12.8, orbax-checkpoint 0.12.8, jax 0.10.2, 2026-11-28): a nnx.List has integers as keys of its layers, and
#   orbax restores them as texts, "0" and "1". `nnx.update` then raises KeyError('Invalid key: 0'). With a template of
#   the state, or after `nnx.restore_int_paths`, it works.
# Where it bites: a checkpoint is read where the module's state is not at hand as a template: in analysis, in other
#   programs, in "restore first, make the module later". Modules without a list work, so a test may miss it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q flax==0.12.8 jax==0.10.2 jaxlib==0.10.2 orbax-checkpoint==0.12.8
FOLDER=$folder "$folder/env/bin/python" - <<'PY'
import os

import jax
import orbax.checkpoint as ocp
from flax import nnx


class Stack(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(2)])


module, path = Stack(nnx.Rngs(0)), os.path.join(os.environ["FOLDER"], "weights")
state = nnx.to_pure_dict(nnx.state(module, nnx.Param))
with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(path, state)
bare = ocp.StandardCheckpointer().restore(path)
template = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
told = ocp.StandardCheckpointer().restore(path, template)
print("saved:", list(state["layers"]), "restored:", list(bare["layers"]), "with a template:", list(told["layers"]))
try:
    nnx.update(module, bare)
    raised = None
except KeyError as error:
    raised = error
print("nnx.update of the bare tree:", repr(raised))
nnx.update(module, nnx.restore_int_paths(bare))
nnx.update(module, told)
assert list(state["layers"]) == list(told["layers"]) == [0, 1] and list(bare["layers"]) == ["0", "1"]
assert raised is not None
PY
