#!/usr/bin/env bash
# One would guess: the temporary memory that XLA's memory analysis reports grows with the arrays that a loop carries, so
#   a model of memory that fits a small case fits a large one.
# Seen (jax 0.10.2, libtpu 0.0.52, compiled for v5e ahead of time, 2026-11-29): XLA keeps an array of 64 MiB that a loop
#   fills and another reads in the chip's VMEM of 128 MiB (layout `S(1)`), and temp_size_in_bytes is 0.4 MiB. One of
#   twice the size is in HBM, and the temporary memory is 128 MiB. peak_memory_in_bytes counts the array in VMEM too, and
#   says more of the small one, 140 MiB, than of the large one, 134 MiB.
# Where it bites: memory predicted from a small model and compared with temp_size_in_bytes seems too high by tens of
#   MiB; and the same program needs more HBM as soon as a microbatch or a layer more does not fit into VMEM.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q jax==0.10.2 libtpu==0.0.52
JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 TPU_WORKER_HOSTNAMES=localhost TPU_ACCELERATOR_TYPE=v5litepod-8 \
    ALLOW_MULTIPLE_LIBTPU_LOAD=1 "$folder/env/bin/python" - <<'PY'
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies

MIB, WIDTH = 2**20, 1024
device = topologies.get_topology_desc("v5e:2x4", platform="tpu").devices[0]
alone = jax.NamedSharding(jax.sharding.Mesh(np.array([device]), ("data",)), jax.P())


def compiled(rows):
    """One loop fills an array of `rows` times 2 MiB, and another reads it."""

    def program(w, x):
        def fill(i, carry):
            saved, x = carry
            x = jnp.tanh(x @ w)
            return saved.at[i % rows].set(x), x

        saved = jnp.zeros((rows, *x.shape), x.dtype)
        saved, x = jax.lax.fori_loop(0, 2 * rows, fill, (saved, x))
        return jax.lax.fori_loop(0, rows, lambda i, g: jnp.tanh(g @ w) * saved[i], x)

    square = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16)
    return jax.jit(program, in_shardings=alone, out_shardings=alone).lower(square, square).compile()


found = {}
for rows in (32, 64):
    program = compiled(rows)
    analysis = program.memory_analysis()
    found[rows] = analysis.temp_size_in_bytes / MIB
    array = rf"bf16\[{rows},{WIDTH},{WIDTH}\]" + r"\{[^}]*\}"
    loops = [line for line in program.as_text().splitlines() if " while(" in line]
    layouts = {layout for line in loops for layout in re.findall(array, line)}
    print(
        f"an array of {2 * rows} MiB: temporary memory {found[rows]:.1f} MiB, peak "
        f"{analysis.peak_memory_in_bytes / MIB:.1f} MiB, carried by loops as {layouts}"
    )
    assert len(layouts) == 1 and ("S(1)" in layouts.pop()) == (rows == 32)
assert found[32] < 1 and found[64] >= 128
PY
