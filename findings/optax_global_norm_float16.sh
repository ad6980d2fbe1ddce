#!/usr/bin/env bash
# One would guess: optax adds the squares of gradients in float32, as jnp.sum adds numbers of 16 bits.
# Seen (optax 0.2.8, jax 0.10.2, CPU, 2026-11-27): the sums of arrays are rounded to the type of the gradients and added
#   in it. In float16 the norm of 100,000 gradients of 1 is infinite, and clip_by_global_norm returns zeros without a
#   word. In bfloat16 the norm over many small arrays is too low: 362 in place of 632, where 1,000 arrays of 300
#   elements follow one of 100,000.
# Where it bites: with gradients in float16 training stops, and the loss stays finite; in bfloat16 clipping begins too
#   late.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q jax==0.10.2 optax==0.2.8
JAX_PLATFORMS=cpu "$folder/env/bin/python" - <<'PY'
import jax
import jax.numpy as jnp
import optax

clip = optax.clip_by_global_norm(1.0)
ones = {"w": jnp.ones(100_000, jnp.float16)}
norm, clipped = optax.global_norm(ones), clip.update(ones, clip.init(ones))[0]["w"]
print(f"float16: norm {float(norm)} in place of 316.2; the largest clipped gradient is {float(jnp.abs(clipped).max())}")
assert jnp.isinf(norm) and not clipped.any()

many = {"0": jnp.ones(100_000, jnp.bfloat16), **{str(n): jnp.ones(300, jnp.bfloat16) for n in range(1, 1001)}}
rounded = float(optax.global_norm(many))
exact = float(optax.global_norm(jax.tree.map(lambda array: array.astype(jnp.float32), many)))
print(f"bfloat16: norm {rounded:.1f} in place of {exact:.1f}")
assert rounded < 0.6 * exact
PY
