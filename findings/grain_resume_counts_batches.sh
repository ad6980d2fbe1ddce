#!/usr/bin/env bash
# One would guess: the state of a grain iterator says how many records were read, so that a run may go on with another
#   batch size.
# Seen (grain 0.2.18, 2026-11-27): it depends on where batch() stands. After to_iter_dataset() the state counts records.
#   Before it, the state counts batches: after 2 batches of 3 (records 0 to 5), a run that goes on with batches of 5
#   begins at record 10, one with batches of 2 at record 4. Both states are {"next_index": N}, and both are accepted.
# Where it bites: the batch size grows during training, or changes with the number of machines: records are left out or
#   come twice, without a word.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q grain==0.2.18
"$folder/env/bin/python" - <<'PY'
import grain

orders = {
    "batch before to_iter_dataset": lambda size: grain.MapDataset.range(40).batch(size).to_iter_dataset(),
    "batch after to_iter_dataset": lambda size: grain.MapDataset.range(40).to_iter_dataset().batch(size),
}
found = {}
for name, batches in orders.items():
    iterator = iter(batches(3))
    read = [next(iterator).tolist() for _ in range(2)]
    for size in (5, 2):
        resumed = iter(batches(size))
        resumed.set_state(iterator.get_state())
        found[name, size] = next(resumed).tolist()
        print(f"{name}: read {read}, state {iterator.get_state()}, next {found[name, size]}")
assert [batch[0] for batch in found.values()] == [10, 4, 6, 6]
PY
