#!/usr/bin/env bash
# One would guess: cost_analysis() of a compiled program counts the floating-point operations that it makes.
# Seen (jax 0.10.2, CPU, 2026-11-27): the body of a loop counts once, whatever the number of turns, although XLA knows
#   it: a scan of 100 products has the operations of one. With unroll, the copies of the body count each.
# Where it bites: layers under lax.scan, microbatches and the ticks of a pipeline are loops. A utilisation computed from
#   cost_analysis() is too low by the number of layers, and changes with unroll.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q jax==0.10.2
JAX_PLATFORMS=cpu "$folder/env/bin/python" - <<'PY'
import jax
import jax.numpy as jnp


def flops(turns, unroll=1):
    product = lambda carry, _: (jnp.sin(carry @ carry), None)
    program = jax.jit(lambda x: jax.lax.scan(product, x, None, length=turns, unroll=unroll)[0])
    return program.lower(jnp.ones((64, 64))).compile().cost_analysis()["flops"]


one, hundred, unrolled = flops(1), flops(100), flops(100, unroll=10)
print(f"1 turn: {one:,.0f}; 100 turns: {hundred:,.0f}; 100 turns, ten at a time: {unrolled:,.0f}")
assert hundred < 1.01 * one and 9.9 * one < unrolled < 10.1 * one
PY
