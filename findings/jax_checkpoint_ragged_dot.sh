#!/usr/bin/env bash
# One would guess: jax.checkpoint with the policy dots_saveable keeps the results of all matrix products.
# Seen (jax 0.10.2, 2026-11-27): it keeps those of dot_general. Those of lax.ragged_dot are computed a second time in
#   the backward pass, just as without a policy. Two products in a row take 4 of them with dot_general and 6 with
#   ragged_dot.
# Where it bites: a mixture of experts. Its experts are most of the FLOPs, and the policy that is to keep products from
#   running twice leaves out exactly these. Names (checkpoint_name, save_only_these_names) keep them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q jax==0.10.2
JAX_PLATFORMS=cpu "$folder/env/bin/python" - <<'PY'
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

policies = jax.checkpoint_policies
ragged_dot = lambda x, w: jax.lax.ragged_dot(x, w, jnp.array([2, 2]))
products = {"dot_general": (jnp.matmul, jnp.ones((4, 4))), "ragged_dot": (ragged_dot, jnp.ones((2, 4, 4)))}


def number(name, policy):
    """How many products the gradient of two layers has."""
    product, weights = products[name]

    def layers(x, w):
        for _ in range(2):
            x = jnp.tanh(checkpoint_name(product(x, w), "product"))
        return x.sum()

    program = jax.make_jaxpr(jax.grad(jax.checkpoint(layers, policy=policy)))(jnp.ones((4, 4)), weights)
    return str(program).count("ragged_dot_general[" if name == "ragged_dot" else "dot_general[")


found = {
    name: (
        number(name, None),
        number(name, policies.dots_saveable),
        number(name, policies.save_only_these_names("product")),
    )
    for name in products
}
for name, numbers in found.items():
    print(f"{name}: {numbers[0]} products without a policy, {numbers[1]} by dots_saveable, {numbers[2]} by names")
assert found == {"dot_general": (6, 4, 4), "ragged_dot": (6, 6, 4)}
PY
