#!/usr/bin/env bash
# One would guess: orbax saves each array of a tree, whatever the keys of its dictionaries are, or refuses a key.
# Seen (orbax-checkpoint 0.12.8, jax 0.10.2, 2026-11-29): it joins the keys of an array with dots to a name. The array
#   at "encoder" → "scale" and the one at "encoder.scale" have one name, so that one of them is lost: both are read as
#   the same numbers, and nothing is said. With different shapes saving fails.
# Where it bites: trees that are flat in part, as where names of PyTorch ("layers.0.weight") stand beside nested
#   parameters. Keys without dots are safe.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q jax==0.10.2 orbax-checkpoint==0.12.8
JAX_PLATFORMS=cpu "$folder/env/bin/python" - "$folder/saved" <<'PY'
import pathlib
import sys

import numpy as np
import orbax.checkpoint as ocp

tree = {"encoder": {"scale": np.ones(2)}, "encoder.scale": np.full(2, 7.0), "decoder": {"scale": np.full(2, 3.0)}}
with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(pathlib.Path(sys.argv[1]), tree)
with ocp.StandardCheckpointer() as checkpointer:
    restored = checkpointer.restore(pathlib.Path(sys.argv[1]))
print("saved", tree)
print("read ", restored)
np.testing.assert_array_equal(restored["encoder"]["scale"], restored["encoder.scale"])
np.testing.assert_array_equal(restored["decoder"]["scale"], tree["decoder"]["scale"])
PY
