#!/usr/bin/env bash
# One would guess: flax's LayerNorm and jax.nn.standardize give a mean of 0 and a variance of 1 in float32 to within
#   rounding, wherever the numbers are.
# Seen (flax 0.12.8, jax 0.10.2, CPU, 2026-11-27): both compute the variance as the mean of squares less the square of
#   the mean. Of numbers around 1,000 with a spread of 1, results are wrong by up to 0.3; around 10,000 they are in the
#   hundreds or thousands. With use_fast_variance=False flax is right to 0.002.
# Where it bites: activations that share a large offset, and raw features (times, prices) that a first layer normalises.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q jax==0.10.2 flax==0.12.8
JAX_PLATFORMS=cpu "$folder/env/bin/python" - <<'PY'
import flax.linen as nn
import jax
import numpy as np

plain = {"use_bias": False, "use_scale": False}
ways = {
    "LayerNorm": lambda x: nn.LayerNorm(**plain).apply({}, x),
    "jax.nn.standardize": jax.nn.standardize,
    "LayerNorm, use_fast_variance=False": lambda x: nn.LayerNorm(**plain, use_fast_variance=False).apply({}, x),
}
error = {}
for mean in (0, 1000, 10_000):
    x = np.random.default_rng(0).normal(mean, 1, (4, 512)).astype(np.float32)
    exact = (x - x.mean(-1, keepdims=True, dtype=float)) / x.std(-1, keepdims=True, dtype=float)
    for name, normalise in ways.items():
        error[name, mean] = float(np.abs(normalise(x) - exact).max())
        print(f"{name}, around {mean}: wrong by up to {error[name, mean]:.2g}")
for name in ("LayerNorm", "jax.nn.standardize"):
    assert error[name, 0] < 1e-3 and error[name, 1000] > 0.1 and error[name, 10_000] > 100
assert max(error["LayerNorm, use_fast_variance=False", mean] for mean in (0, 1000, 10_000)) < 0.01
PY
