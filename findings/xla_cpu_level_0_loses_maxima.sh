#!/usr/bin/env bash
# One would guess: XLA's flag --xla_backend_optimization_level=0, which makes programs for CPUs compile faster, changes
#   their speed, and their results by rounding alone.
# Seen (jax 0.10.2, x86-64, 2026-11-29): the gradient of the maximum of `x * g + b` has a NaN. XLA makes the sum twice,
#   for the maximum and for the comparison with it, and at level 0 rounds the two differently. Where no element equals
#   the maximum, the gradient is divided by a count of zero. With level 1 and with the default all is right.
# Where it bites: a test suite that sets the flag for speed; and whoever makes values again in a backward pass and
#   compares them with a maximum of the forward pass, whatever the flags.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q jax==0.10.2
cat > "$folder/maximum.py" <<'PY'
import jax
import jax.numpy as jnp

g, b, x = map(jax.random.normal, jax.random.split(jax.random.key(0), 3), ((32,), (32,), (2, 16, 32)))


def function(g):
    return (x * g + b).max(-1).sum()


print(int(jnp.isnan(jax.jit(jax.grad(function))(g)).sum()))
PY
for level in 0 1 ""; do
    found=$(env JAX_PLATFORMS=cpu XLA_FLAGS="${level:+--xla_backend_optimization_level=$level}" \
        "$folder/env/bin/python" "$folder/maximum.py")
    echo "level ${level:-by default}: $found of 32 numbers of the gradient are NaN"
    if [ "$level" = 0 ]; then [ "$found" -gt 0 ]; else [ "$found" = 0 ]; fi
done
