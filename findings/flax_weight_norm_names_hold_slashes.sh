#!/usr/bin/env bash
# One would guess: names of parameters in Flax are identifiers, so that `unflatten_dict(flatten_dict(params, sep="/"),
#   sep="/")` gives back the same tree, as converters of weights assume.
# Seen (flax 0.12.8, jax 0.10.2, 2026-11-29): linen.WeightNorm names its parameter "Dense_0/kernel/scale", one key with
#   slashes. Flattened and unflattened it becomes three nested dictionaries, and the module no longer finds it.
# Where it bites: files of weights with flat names (safetensors, msgpack with "/") for models with weight normalisation,
#   such as vocoders; and tools that take keys for words. With tuples in place of `sep` the tree comes back.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q jax==0.10.2 flax==0.12.8
JAX_PLATFORMS=cpu "$folder/env/bin/python" - <<'PY'
import jax
import jax.numpy as jnp
from flax import errors, linen
from flax.traverse_util import flatten_dict, unflatten_dict


class Normalised(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.WeightNorm(linen.Dense(4))(x)


x = jnp.ones((2, 3))
params = Normalised().init(jax.random.key(0), x)["params"]
back = unflatten_dict(flatten_dict(params, sep="/"), sep="/")
print("made by the module:       ", jax.tree.map(jnp.shape, params))
print("flattened and unflattened:", jax.tree.map(jnp.shape, back))
assert list(params["WeightNorm_0"]) == ["Dense_0/kernel/scale"] and list(back["WeightNorm_0"]) == ["Dense_0"]
assert jax.tree.structure(unflatten_dict(flatten_dict(params))) == jax.tree.structure(params)
try:
    Normalised().apply({"params": back}, x)
except errors.ScopeParamNotFoundError as error:
    print(type(error).__name__, str(error).partition(" (")[0])
else:
    raise AssertionError("the module finds its parameter")
PY
