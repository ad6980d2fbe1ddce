#!/usr/bin/env bash
# One would guess: what safetensors.numpy and safetensors.flax save, they load; bfloat16, which numpy lacks too, goes
#   both ways.
# Seen (safetensors 0.8.0, numpy 2.4.6, ml_dtypes 0.5.4, jax 0.10.2, 2026-11-28): both save arrays of float8_e4m3fn and
#   float8_e5m2, with the right dtype in the file. Loading them raises AttributeError, "module 'numpy' has no attribute
#   'float8_e4m3fn'", although jax and ml_dtypes have the type.
# Where it bites: folders of float8 weights, as many large models are published, and a program's own float8 checkpoint
#   after its last save. Viewing the bytes as ml_dtypes' type reads them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q safetensors==0.8.0 numpy==2.4.6 ml_dtypes==0.5.4 jax==0.10.2 jaxlib==0.10.2
JAX_PLATFORMS=cpu "$folder/env/bin/python" - "$folder/x.safetensors" <<'PY'
import json
import sys

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors.flax
import safetensors.numpy

file = sys.argv[1]
for module, ones in ((safetensors.numpy, np.ones), (safetensors.flax, jnp.ones)):
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        module.save_file({"x": ones(4, getattr(ml_dtypes, name))}, file)
        data = open(file, "rb").read()
        length = int.from_bytes(data[:8], "little")
        stored = json.loads(data[8 : 8 + length])["x"]["dtype"]
        try:
            loaded = str(module.load_file(file)["x"].dtype)
        except AttributeError as error:
            loaded = str(error)
        print(f"{module.__name__}: {name} is saved as {stored}; loaded: {loaded}")
        assert loaded == ("bfloat16" if name == "bfloat16" else f"module 'numpy' has no attribute '{name}'")
        assert (np.frombuffer(data[8 + length :], getattr(ml_dtypes, name)) == 1).all()
PY
