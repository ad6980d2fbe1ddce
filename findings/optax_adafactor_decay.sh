#!/usr/bin/env bash
# One would guess: weight decay of optax's Adafactor is multiplied by the learning rate, as in optax's AdamW and Lion.
# Seen (optax 0.2.8, jax 0.10.2, 2026-11-27): with a learning rate of 0.01, decay 0.1 and a gradient of zero, AdamW and
#   Lion take 0.1% of a weight, and Adafactor takes 10%. Its decay ignores the learning rate.
# Where it bites: who changes the optimizer and keeps the decay multiplies the decay by 1 / learning rate. The weights go
#   to zero in some tens of steps, also while the learning rate warms up. A decay that is a function of the step, such as
#   lambda step: 0.1 * learning_rate(step), is what AdamW does.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q jax==0.10.2 optax==0.2.8
JAX_PLATFORMS=cpu "$folder/env/bin/python" - <<'PY'
import jax.numpy as jnp
import optax

optimizers = {
    "adamw": optax.adamw(0.01, weight_decay=0.1),
    "lion": optax.lion(0.01, weight_decay=0.1),
    "adafactor": optax.adafactor(0.01, weight_decay_rate=0.1),
}
weights = jnp.ones((4, 4))
taken = {}
for name, optimizer in optimizers.items():
    update, _ = optimizer.update(jnp.zeros_like(weights), optimizer.init(weights), weights)
    taken[name] = -float(update[0, 0])
    print(f"{name}: takes {taken[name]:.4f} of a weight of 1")
assert {name: round(value, 6) for name, value in taken.items()} == {"adamw": 0.001, "lion": 0.001, "adafactor": 0.1}
PY
