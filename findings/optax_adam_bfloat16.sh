#!/usr/bin/env bash
# One would guess: with weights in bfloat16, optax.adam is less exact by some percent, and forgets old gradients as fast
#   as with float32.
# Seen (optax 0.2.8, jax 0.10.2, CPU, 2026-11-27): the second moment has the type of the weights, and 0.999 times a
#   bfloat16 rounds to the same number. It never falls: 3,000 gradients of 0 after one of 30 leave it as it was, where
#   float32 has 5% left. It also stops rising early: gradients of 1 take it to 0.5 and not to 1. The option mu_dtype is
#   for the first moment alone.
# Where it bites: after one large gradient, an element's updates are small for the rest of the training.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q jax==0.10.2 optax==0.2.8
JAX_PLATFORMS=cpu "$folder/env/bin/python" - <<'PY'
import jax
import jax.numpy as jnp
import optax

optimizer = optax.adam(1e-3, mu_dtype=jnp.float32)


@jax.jit
def second_moment(weight, gradients):
    step = lambda state, gradient: (optimizer.update(gradient, state, weight)[1], None)
    return jax.lax.scan(step, optimizer.init(weight), gradients)[0][0].nu


found = {}
for dtype in (jnp.float32, jnp.bfloat16):
    weight, shock, calm = jnp.zeros((), dtype), jnp.full(1, 30, dtype), jnp.zeros(3000, dtype)
    before = float(second_moment(weight, shock))
    after = float(second_moment(weight, jnp.concatenate([shock, calm])))
    risen = float(second_moment(weight, jnp.ones(10_000, dtype)))
    found[dtype] = after / before, risen
    print(f"{jnp.dtype(dtype).name}: {after / before:.0%} left after 3,000 zeros; {risen:.2f} after 10,000 ones")
assert found[jnp.bfloat16] == (1, 0.5) and found[jnp.float32][0] < 0.06 and found[jnp.float32][1] > 0.99
PY
