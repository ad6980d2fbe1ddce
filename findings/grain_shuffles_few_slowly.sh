#!/usr/bin/env bash
# One would guess: shuffling fewer examples takes no longer than shuffling more.
# Seen (grain 0.2.18, 2026-11-28): an index of shuffle() takes longer, the fewer examples there are. In two runs the
#   medians were 10 and 23 ms for 3 examples, and 0.023 and 0.025 ms for 100,000 (two cores of a shared x86-64 machine
#   with other work on it). grain finds the example of an index by a permutation of 2^16 numbers or more, because
#   smaller permutations showed patterns. It applies the permutation again and again until the result is one of the n
#   examples: for small n 2^16 / n times in the mean, which is 21,845 times for 3 examples.
# Where it bites: a first try, or a test, with a few examples waits for its data most of the time, which looks like a
#   slow disk or a slow tokenizer. Of 1,000 examples an index takes a fraction of a millisecond.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q grain==0.2.18 numpy==2.4.6
"$folder/env/bin/python" - <<'PY'
import statistics
import time

import grain

median_ms = {}
for number in (3, 100_000):
    order = grain.MapDataset.range(number).seed(0).shuffle().repeat()
    times = []
    for index in range(200):
        start = time.perf_counter()
        order[index]
        times.append(time.perf_counter() - start)
    median_ms[number] = 1e3 * statistics.median(times)
    print(f"{number:,} examples: {median_ms[number]:.3f} ms an index, median of {len(times)}")
assert median_ms[3] >= 20 * median_ms[100_000]
PY
