#!/usr/bin/env bash
# One would guess: a flax.nnx.Embed that is given no dtype computes in the dtype of its table, as nnx.Linear without one
#   computes in the common dtype of its input and its kernel.
# Seen (flax 0.12.8, jax 0.10.2, 2026-11-28): it computes in the dtype that its table had when the module was made. With
#   all parameters rounded to bfloat16, Linear gives bfloat16, and Embed looks up float32; its `attend` turns activations
#   and table, both bfloat16, into float32 and multiplies these.
# Where it bites: mixed precision by rounding the parameters before each step. Activations are float32 from the embedding
#   on, and the product with the vocabulary, often the largest of a small model, runs in float32; nothing says so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q flax==0.12.8 jax==0.10.2 jaxlib==0.10.2
"$folder/env/bin/python" - <<'PY'
import jax
import jax.numpy as jnp
from flax import nnx


def rounded(module):
    graph, state = nnx.split(module)
    return nnx.merge(graph, jax.tree.map(lambda w: w.astype(jnp.bfloat16), state))


linear = rounded(nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
embed = rounded(nnx.Embed(16, 8, rngs=nnx.Rngs(0)))
told = rounded(nnx.Embed(16, 8, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
x = jnp.ones((2, 8), jnp.bfloat16)
dtypes = {
    "Linear": linear(x).dtype,
    "Embed": embed(jnp.arange(2)).dtype,
    "Embed.attend": embed.attend(x).dtype,
    "Embed with dtype=bfloat16": told(jnp.arange(2)).dtype,
}
print(f"table {embed.embedding[...].dtype}, input {x.dtype}")
for name, dtype in dtypes.items():
    print(f"{name}: {dtype}")
assert embed.embedding[...].dtype == jnp.bfloat16
assert dtypes["Linear"] == dtypes["Embed with dtype=bfloat16"] == jnp.bfloat16
assert dtypes["Embed"] == dtypes["Embed.attend"] == jnp.float32
(product,) = (each for each in jax.make_jaxpr(embed.attend)(x).eqns if each.primitive.name == "dot_general")
assert {each.aval.dtype for each in product.invars} == {jnp.dtype("float32")}
PY
