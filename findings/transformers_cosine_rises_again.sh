#!/usr/bin/env bash
# One would guess: get_cosine_schedule_with_warmup stays at its last value, 0, after num_training_steps, as optax's
#   cosine schedules and transformers' linear schedule do.
# Seen (transformers 5.24.0, torch 2.13.0, 2026-11-27): it follows the cosine on. At twice the steps of the decay the
#   learning rate is at its maximum again.
# Where it bites: num_training_steps is too small, because it counts epochs, devices or accumulated batches otherwise
#   than the loop that calls step(), or a run is extended from a checkpoint: the learning rate climbs while nothing is
#   said.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy
"$folder/env/bin/pip" install -q transformers==5.24.0
HF_HUB_OFFLINE=1 "$folder/env/bin/python" -W ignore - <<'PY'
import torch
import transformers

found = {}
for name in ("linear", "cosine"):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = transformers.get_scheduler(name, optimizer, num_warmup_steps=2, num_training_steps=6)
    rates = []
    for _ in range(11):
        rates.append(round(optimizer.param_groups[0]["lr"], 6))
        optimizer.step()
        schedule.step()
    found[name] = rates
    print(f"{name}, 2 steps of warmup, 6 in all:", *(f"{rate:.2f}" for rate in rates))
assert found["linear"][6:] == [0] * 5
assert found["cosine"][6] == 0 and found["cosine"][8] == 0.5 and found["cosine"][10] == 1
PY
