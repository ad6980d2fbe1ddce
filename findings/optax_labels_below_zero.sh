#!/usr/bin/env bash
# One would guess: a label of -100, which PyTorch and transformers give to tokens that do not count, adds nothing to
#   optax's cross-entropy, or makes it NaN.
# Seen (optax 0.2.8, jax 0.10.2, CPU, 2026-11-27): softmax_cross_entropy_with_integer_labels counts labels below 0 from
#   the end. -100 is the class with the number of classes less 100, and its loss is finite. softmax_cross_entropy of a
#   one-hot label gives 0 for it. A label above the last class gives NaN by the first and 0 by the second.
# Where it bites: a data collator of transformers feeds a JAX model. At every padding token the model learns to predict
#   one rare token of the vocabulary, and the loss is finite. The argument `where` leaves tokens out.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q jax==0.10.2 optax==0.2.8
JAX_PLATFORMS=cpu "$folder/env/bin/python" - <<'PY'
import jax
import jax.numpy as jnp
import optax

classes = 200
logits = jax.random.normal(jax.random.key(0), (classes,))
found = {}
for label in (100, -100, 1000):
    integer = float(optax.softmax_cross_entropy_with_integer_labels(logits, jnp.array(label)))
    one_hot = float(optax.softmax_cross_entropy(logits, jax.nn.one_hot(label, classes)))
    found[label] = integer
    print(f"label {label} of {classes} classes: {integer:.4f} by its number, {one_hot:.4f} by one-hot")
    assert label == 100 or one_hot == 0
assert found[-100] == found[100] > 0 and found[1000] != found[1000]
PY
