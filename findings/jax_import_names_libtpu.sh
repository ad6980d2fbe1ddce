#!/usr/bin/env bash
# One would guess: a Python program uses the libtpu that is installed in its own environment.
# Seen (jax 0.10.2, libtpu 0.0.52, 2026-11-27): `import jax` puts the path of its own libtpu into the environment
#   variable TPU_LIBRARY_PATH, on a machine without TPUs too, and libtpu keeps a value that is there. A child process of
#   another Python environment therefore loads its parent's libtpu, and not the one beside its jax.
# Where it bites: a program that compares two versions, or starts a server that has its own environment, compiles with
#   the same libtpu everywhere. One has to take TPU_LIBRARY_PATH out of the child's environment.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q jax==0.10.2 libtpu==0.0.52
mkdir "$folder/other"
cp -al "$folder"/env/lib/python3*/site-packages/libtpu* "$folder/other" # stands for another environment
env -u TPU_LIBRARY_PATH JAX_PLATFORMS=cpu "$folder/env/bin/python" - "$folder/other" <<'PY'
import os
import subprocess
import sys

import jax  # noqa: F401


def child(environment):
    """The libtpu that a program beside another libtpu imports, and the path that it then has for the library."""
    code = "import os, libtpu; print(libtpu.__file__, os.environ['TPU_LIBRARY_PATH'])"
    command = [sys.executable, "-c", code]
    environment = {**environment, "PYTHONPATH": sys.argv[1]}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.split()


print("after import jax:", os.environ["TPU_LIBRARY_PATH"])
without = {name: value for name, value in os.environ.items() if name != "TPU_LIBRARY_PATH"}
(module, inherited), (_, alone) = child(os.environ), child(without)
print(f"a child that imports {module}: {inherited}; without the variable: {alone}")
assert "/other/" in module and "/other/" in alone
assert inherited == os.environ["TPU_LIBRARY_PATH"] and "/env/" in inherited
PY
