#!/usr/bin/env bash
# One would guess: the names in a compiled program (jax.named_scope, functions, lines) are those of the program that was
#   compiled, also when it comes from jax's compilation cache.
# Seen (jax 0.10.2, CPU, 2026-11-27): the cache's key leaves names out, so a program whose scopes were renamed comes back
#   with the names of the one that was compiled first. jax_compilation_cache_include_metadata_in_key is off by default.
# Where it bites: as_text() and profiles show scopes and lines that the code no longer has, and a tool that looks for a
#   scope by its name finds nothing, on machines with a warm cache only.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q jax==0.10.2
cat >"$folder/program.py" <<'PY'
import sys

import jax
import jax.numpy as jnp


@jax.jit
def step(x):
    with jax.named_scope(sys.argv[1]):
        return jnp.sin(x @ x)


text = step.lower(jnp.ones((64, 64))).compile().as_text()
print([name for name in ("former_name", "later_name") if name in text])
PY
export JAX_PLATFORMS=cpu JAX_COMPILATION_CACHE_DIR="$folder/cache" JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
export JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1
first=$("$folder/env/bin/python" "$folder/program.py" former_name)
second=$("$folder/env/bin/python" "$folder/program.py" later_name)
third=$(JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY=1 "$folder/env/bin/python" "$folder/program.py" later_name)
echo "compiled as former_name: $first; then as later_name: $second; with names in the key: $third"
[ "$first" = "['former_name']" ] && [ "$second" = "['former_name']" ] && [ "$third" = "['later_name']" ]
