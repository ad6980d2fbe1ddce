#!/usr/bin/env bash
# One would guess: jax.random.categorical draws tokens by their probability from logits in bfloat16, but for the
#   rounding of the logits.
# Seen (jax 0.10.2 and 0.12.0.1, CPU, 2026-11-27): the noise is drawn in the type of the logits, and a uniform bfloat16
#   has 128 different values. Of 1,024 equally probable tokens, the first 64 come up in 40% of the draws in place of 6%,
#   and some 300 never do: where the largest noise is there more than once, the first place wins. bernoulli with a
#   probability of 0.001 in bfloat16 is true in 0.8% of the draws.
# Where it bites: text that is sampled from a model that computes in bfloat16, and drop rates that are computed in it.
#   Logits that are cast to float32 first are sampled as they should be.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q jax==0.10.2
JAX_PLATFORMS=cpu "$folder/env/bin/python" - <<'PY'
import jax
import jax.numpy as jnp

key, draws = jax.random.key(0), 20_000
share, never = {}, {}
for dtype in (jnp.float32, jnp.bfloat16):
    tokens = jax.random.categorical(key, jnp.zeros(1024, dtype), shape=(draws,))
    share[dtype] = float((tokens < 64).mean())
    never[dtype] = int((jnp.bincount(tokens, length=1024) == 0).sum())
    name = jnp.dtype(dtype).name
    print(f"{name}: {share[dtype]:.1%} of the draws are one of the first 64 tokens; {never[dtype]} tokens never come")
values = len(jnp.unique(jax.random.uniform(key, (2**17,), jnp.bfloat16).astype(jnp.float32)))
dropped = float(jax.random.bernoulli(key, jnp.bfloat16(0.001), (2**20,)).mean())
print(f"a uniform bfloat16 has {values} values; 0.001 in bfloat16 is true in {dropped:.2%} of the draws")
assert 0.05 < share[jnp.float32] < 0.075 and never[jnp.float32] == 0
assert share[jnp.bfloat16] > 0.3 and never[jnp.bfloat16] > 200
assert values == 128 and dropped > 0.007
PY
