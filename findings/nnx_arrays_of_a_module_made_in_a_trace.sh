#!/usr/bin/env bash
# One would guess: what `nnx.split` calls state does not depend on where a module was made. So `nnx.eval_shape` of a
#   constructor tells the shapes of all that the module keeps.
# Seen (flax 0.12.8, jax 0.10.2, 2026-11-28): an attribute that is a plain jax array, such as a mask or a table of
#   rotations, is a leaf of the state if the module was made outside of a trace. If it was made inside one (eval_shape,
#   jit, vmap), the attribute is static: the state lacks it, and the graph holds an array of the trace.
# Where it bites: whoever makes abstract modules to restore a checkpoint, to shard before initialization, or to stack
#   layers by vmap. The state of the abstract module has fewer leaves than that of the real one, and the graph cannot be
#   hashed. `nnx.Variable(array)` is state in both.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q flax==0.12.8 jax==0.10.2 jaxlib==0.10.2
"$folder/env/bin/python" - <<'PY'
import jax
import jax.numpy as jnp
from flax import nnx


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.mask = jnp.tril(jnp.ones((4, 4)))
        self.scale = nnx.Variable(jnp.ones(4))


def names(module):
    return sorted(".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(module)))


real, abstract = names(Layer(nnx.Rngs(0))), names(nnx.eval_shape(lambda: Layer(nnx.Rngs(0))))
print("made outside of a trace:", real)
print("made by nnx.eval_shape:", abstract)
assert real == ["linear.bias", "linear.kernel", "mask", "scale"]
assert abstract == ["linear.bias", "linear.kernel", "scale"]
graph = nnx.split(nnx.eval_shape(lambda: Layer(nnx.Rngs(0))))[0]
held = dict(graph.attributes)["mask"].value
print("the graph holds:", type(held).__name__)
assert isinstance(held, jax.core.Tracer)
PY
