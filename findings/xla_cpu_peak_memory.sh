#!/usr/bin/env bash
# One would guess: memory_analysis().peak_memory_in_bytes is the most memory that a compiled program holds at once.
# Seen (jax 0.10.2, CPU, 2026-11-27): on CPUs it is the size of arguments and results. A program with temporaries of
#   64 MiB for an argument of 16 bytes has a peak of a few bytes; temp_size_in_bytes tells the temporaries.
# Where it bites: a check that a train step fits, tested on CPUs as continuous integration has them, sees no activations.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q jax==0.10.2
JAX_PLATFORMS=cpu "$folder/env/bin/python" - <<'PY'
import jax
import jax.numpy as jnp


@jax.jit
def program(x):
    large = jnp.sort(jnp.sin(jnp.arange(2.0**24)) * x[0])  # sorting keeps XLA from computing it bit by bit
    return large[:: 2**22]


found = program.lower(jnp.ones(4)).compile().memory_analysis()
print(f"peak_memory_in_bytes {found.peak_memory_in_bytes:,}, temp_size_in_bytes {found.temp_size_in_bytes:,}")
assert found.temp_size_in_bytes >= 2**26 and found.peak_memory_in_bytes < 1000
PY
