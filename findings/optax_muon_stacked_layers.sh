#!/usr/bin/env bash
# One would guess: optax.contrib.muon orthogonalises the matrices of layers that are stacked in one array, as models have
#   them that run their layers by lax.scan, each matrix on its own.
# Seen (optax 0.2.8, jax 0.10.2, 2026-11-27): only arrays of two dimensions are updated by Muon. An array of three
#   dimensions is updated by Adam, without a word: the first update has elements of equal size, as Adam's has.
# Where it bites: a model is trained by Adam at Muon's learning rate. One has to pass muon_weight_dimension_numbers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q jax==0.10.2 optax==0.2.8
JAX_PLATFORMS=cpu "$folder/env/bin/python" - <<'PY'
import jax
import jax.numpy as jnp
import numpy as np
import optax


def first_update(gradient, **options):
    optimizer = optax.contrib.muon(1.0, **options)
    weights = {"w": jnp.zeros_like(gradient)}
    return np.asarray(optimizer.update({"w": gradient}, optimizer.init(weights), weights)[0]["w"])


stacked = jax.random.normal(jax.random.key(0), (3, 8, 4))
alone = np.stack([first_update(layer) for layer in stacked])
together = first_update(stacked)
told = first_update(stacked, muon_weight_dimension_numbers={"w": optax.contrib.MuonDimensionNumbers(1, 2)})
print(f"each layer alone: elements from {np.abs(alone).min():.3f} to {np.abs(alone).max():.3f}")
print(f"stacked: elements from {np.abs(together).min():.3f} to {np.abs(together).max():.3f}")
print(f"with dimension numbers it is that of the layers alone, up to {np.abs(told - alone).max():.1e}")
assert np.ptp(np.abs(together)) < 1e-3 < 0.1 < np.ptp(np.abs(alone))
assert np.abs(told - alone).max() < 1e-4
PY
