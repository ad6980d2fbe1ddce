#!/usr/bin/env bash
# One would guess: the compiled text of a program shows a collective of bfloat16 arrays in bfloat16; at most one that
#   adds, an all-reduce, is done in float32.
# Seen (jax 0.10.2 and 0.12.0.1, CPU, 2026-11-27): on CPUs XLA also turns those into float32 that only move data:
#   all-gather, all-to-all and collective-permute. The program converts, sends twice the bytes, and converts back.
# Where it bites: who counts communication from the compiled text on CPUs, as continuous integration has them, counts
#   twice the bytes that TPUs send (compiled for v5e by libtpu 0.0.52, the same program has bfloat16 all-gathers).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q jax==0.10.2
JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=4 "$folder/env/bin/python" - <<'PY'
import re

import jax
import jax.numpy as jnp
from jax import lax

mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
ring = [(rank, (rank + 1) % 4) for rank in range(4)]
programs = {
    "all-reduce": lambda x: lax.psum(x, "data"),
    "reduce-scatter": lambda x: lax.psum_scatter(x, "data", tiled=True),
    "all-gather": lambda x: lax.all_gather(x, "data", tiled=True),
    "all-to-all": lambda x: lax.all_to_all(x, "data", 0, 0, tiled=True),
    "collective-permute": lambda x: lax.ppermute(x, "data", ring),
}
found = {}
for name, program in programs.items():
    out = jax.P() if name == "all-reduce" else jax.P("data")
    mapped = jax.jit(jax.shard_map(program, mesh=mesh, in_specs=jax.P("data"), out_specs=out))
    text = mapped.lower(jnp.ones((64, 8), jnp.bfloat16)).compile().as_text()
    found[name] = re.search(rf"= \(?(\w+)\[.* {name}(-start)?\(", text)[1]
    print(f"{name} of bfloat16: {found[name]}")
assert set(found.values()) == {"f32"}
PY
