#!/usr/bin/env bash
# One would guess: optax.inject_hyperparams(optax.adamw) trains as optax.adamw does, and lets one read and set numbers.
# Seen (optax 0.2.8, jax 0.10.2, CPU, 2026-11-27): it holds all numbers in the type of the first array of weights. In
#   bfloat16 b2 = 0.999 is 1, the bias correction divides 0 by 0, and the first update is NaN. optax.adamw alone
#   computes with the exact b2, and its update is finite. Which type is taken depends on the name of the first array in
#   the tree.
# Where it bites: a run with weights in bfloat16 dies when the learning rate is to be logged. The argument
#   hyperparam_dtype=jnp.float32 helps.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q jax==0.10.2 optax==0.2.8
JAX_PLATFORMS=cpu "$folder/env/bin/python" - <<'PY'
import jax.numpy as jnp
import optax

weights = {"w": jnp.ones(1, jnp.bfloat16)}
optimizers = {
    "adamw": optax.adamw(1e-3),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
    "inject_hyperparams, float32": optax.inject_hyperparams(optax.adamw, hyperparam_dtype=jnp.float32)(1e-3),
}
found = {}
for name, optimizer in optimizers.items():
    update, state = optimizer.update(weights, optimizer.init(weights), weights)
    found[name] = bool(jnp.isfinite(update["w"]).all())
    print(f"{name}: update {float(update['w'][0]):.3g}, b2 {getattr(state, 'hyperparams', {}).get('b2', 'exact')}")
assert found == {"adamw": True, "inject_hyperparams": False, "inject_hyperparams, float32": True}
PY
