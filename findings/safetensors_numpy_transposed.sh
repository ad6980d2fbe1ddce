#!/usr/bin/env bash
# One would guess: safetensors.numpy.save_file writes the array that it is given, or refuses one that is not contiguous,
#   as save_file of torch does.
# Seen (safetensors 0.8.0, numpy 2.4.6, 2026-11-28): of a transposed array it writes the numbers in the order in which
#   they lie in memory, under the new shape, and says nothing. What is read back has the right shape and the wrong
#   places. Of every second column it writes the first numbers of all columns.
# Where it bites: weights of jax are [inputs, outputs], those of torch [outputs, inputs], so whoever writes a folder for
#   transformers writes kernels as `x.T`, which numpy makes without a copy. np.ascontiguousarray before saving mends it;
#   arrays of jax, through safetensors.flax, come out right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q safetensors==0.8.0 numpy==2.4.6
"$folder/env/bin/python" - "$folder/kernel.safetensors" <<'PY'
import sys

import numpy as np
from safetensors.numpy import load_file, save_file

file, kernel = sys.argv[1], np.arange(6.0).reshape(2, 3)
for text, array in {
    "as it is": kernel,
    "transposed": kernel.T,
    "every second column": kernel[:, ::2],
    "transposed and copied": np.ascontiguousarray(kernel.T),
}.items():
    save_file({"kernel": array}, file)
    read = load_file(file)["kernel"]
    print(f"{text}: given {array.tolist()}, read {read.tolist()}")
    assert read.shape == array.shape
    assert np.array_equal(read, array) == (text in ("as it is", "transposed and copied"))
PY
