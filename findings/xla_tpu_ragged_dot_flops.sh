#!/usr/bin/env bash
# One would guess: lax.ragged_dot multiplies each row with the matrix of its group alone, at least on TPUs, whose users
#   it was made for. Its FLOPs do not depend on the number of groups.
# Seen (jax 0.10.2, libtpu 0.0.52, compiled for v5e ahead of time, and CPU, 2026-11-27): XLA multiplies all rows with
#   all matrices and selects. With 8 groups the compiled program has 8 times the FLOPs of a product, with 64 groups 64
#   times.
# Where it bites: a mixture of experts without dropping costs as much as if every token went to every expert. The figure
#   is XLA's cost analysis; no TPU was timed. A kernel of one's own (Pallas) is what avoids it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q jax==0.10.2 libtpu==0.0.52
JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 TPU_WORKER_HOSTNAMES=localhost TPU_ACCELERATOR_TYPE=v5litepod-8 \
    ALLOW_MULTIPLE_LIBTPU_LOAD=1 "$folder/env/bin/python" - <<'PY'
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies

rows, width = 1024, 256
devices = {"v5e": topologies.get_topology_desc("v5e:2x4", platform="tpu").devices[0], "CPU": jax.devices()[0]}
for name, device in devices.items():
    alone = jax.NamedSharding(jax.sharding.Mesh(np.array([device]), ("data",)), jax.P())
    program = jax.jit(jax.lax.ragged_dot, in_shardings=alone, out_shardings=alone)
    for groups in (8, 64):
        kinds = ((rows, width), jnp.bfloat16), ((groups, width, width), jnp.bfloat16), ((groups,), jnp.int32)
        compiled = program.lower(*(jax.ShapeDtypeStruct(*kind) for kind in kinds)).compile()
        times = compiled.cost_analysis()["flops"] / (2 * rows * width * width)
        print(f"{name}, {groups} groups: {times:.2f} times the FLOPs of one product of all rows")
        assert groups <= times < 1.1 * groups
PY
