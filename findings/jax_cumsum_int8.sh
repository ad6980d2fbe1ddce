#!/usr/bin/env bash
# One would guess: jnp.cumsum of an int8 array counts as jnp.sum and NumPy's cumsum do, in a wider type.
# Seen (jax 0.10.2 and 0.12.0.1, CPU, 2026-11-27): jnp.sum of int8 gives int32, and np.cumsum gives int64. jnp.cumsum
#   stays in int8 and wraps around: the sum of 300 ones is 300, and the last of their cumulative sums is 44. A mask of
#   type bool is counted in int32.
# Where it bites: positions in a sequence, and places in an expert's buffer, are cumulative sums of masks. They are
#   right in tests with up to 127 tokens.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q jax==0.10.2
JAX_PLATFORMS=cpu "$folder/env/bin/python" - <<'PY'
import jax.numpy as jnp
import numpy as np

last = {}
for dtype in ("int8", "uint8", "bool"):
    ones = jnp.ones(300, dtype)
    last[dtype] = int(jnp.cumsum(ones)[-1])
    print(f"{dtype}: sum {jnp.sum(ones)}, cumsum {last[dtype]}, NumPy's cumsum {np.cumsum(np.asarray(ones))[-1]}")
    assert jnp.sum(ones) == np.cumsum(np.asarray(ones))[-1] == 300
assert last == {"int8": 44, "uint8": 44, "bool": 300}
PY
