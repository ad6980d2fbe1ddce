#!/usr/bin/env bash
# One would guess: after model.save_pretrained(FOLDER), from_pretrained(FOLDER) gives the weights that were saved last.
# Seen (transformers 5.24.0, torch 2.13.0, 2026-11-27): a save in one file and a save in shards leave each other's files
#   in the folder, and model.safetensors is read whenever it is there. A model that is saved in shards into a folder that
#   has an older model.safetensors is not what from_pretrained gives: the older one is, without a word.
# Where it bites: a model grows above the size of a shard, or max_shard_size changes, while a run saves into one folder.
#   Other programs read the index first, so that the same folder is one model here and another there.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy
"$folder/env/bin/pip" install -q transformers==5.24.0
HF_HUB_OFFLINE=1 "$folder/env/bin/python" - 2>"$folder/log" <<'PY'
import pathlib
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel


def model(seed):
    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2))


def is_same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


older, newer = model(0), model(1)
with tempfile.TemporaryDirectory() as name:
    older.save_pretrained(name)
    newer.save_pretrained(name, max_shard_size="10KB")
    print(*sorted(path.name for path in pathlib.Path(name).iterdir()), sep="\n")
    loaded = GPT2LMHeadModel.from_pretrained(name)
print("loaded is the model that was saved last:", is_same(loaded, newer))
print("loaded is the older model:", is_same(loaded, older))
assert is_same(loaded, older) and not is_same(loaded, newer)
PY
