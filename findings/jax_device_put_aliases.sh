#!/usr/bin/env bash
# One would guess: jax arrays never change, so a NumPy array may be filled anew as soon as a jax array was made of it.
# Seen (jax 0.10.2 and 0.12.0.1, CPU, 2026-11-27): jax.device_put and jax.make_array_from_process_local_data use the
#   memory of a NumPy array that begins at a multiple of 64 bytes, and copy any other. Where it is used, filling the
#   NumPy array changes the jax array. jnp.asarray, whose name promises less, copies.
# Where it bites: a loader that reuses a buffer for its batches trains on the wrong data on CPUs, only in some runs,
#   because the allocator decides where an array begins. On other devices the same loader is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q jax==0.10.2
JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=2 "$folder/env/bin/python" - <<'PY'
import jax
import jax.numpy as jnp
import numpy as np

sharding = jax.NamedSharding(jax.make_mesh((2,), ("data",)), jax.P("data"))
ways = {
    "jax.device_put": jax.device_put,
    "jax.make_array_from_process_local_data": lambda batch: jax.make_array_from_process_local_data(sharding, batch),
    "jnp.asarray": jnp.asarray,
}


def changes(make, offset):
    """Whether the jax array of a NumPy array that begins `offset` bytes after a multiple of 64 changes with it."""
    memory = np.zeros(2**16, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    batch = memory[start : start + 2**15].view(np.float32)
    array = jax.block_until_ready(make(batch))
    batch[:] = 1
    return bool(np.asarray(array).all())


found = {name: (changes(make, 0), changes(make, 16)) for name, make in ways.items()}
for name, (aligned, other) in found.items():
    print(f"{name}: changes with an array at a multiple of 64 bytes: {aligned}, with one 16 bytes later: {other}")
assert list(found.values()) == [(True, False), (True, False), (False, False)]
PY
