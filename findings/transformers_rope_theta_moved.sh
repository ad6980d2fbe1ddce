#!/usr/bin/env bash
# One would guess: a config.json that transformers 5 writes is read by transformers 4 as the same model, or refused.
# Seen (transformers 5.24.0 and 4.57.1, 2026-11-27): version 5 writes the base of rotary positions as
#   rope_parameters.rope_theta, and no rope_theta at the top. Version 4 reads such a file without a word, keeps
#   rope_parameters as a field it does not use, and takes 10,000 for the base.
# Where it bites: a Llama 3 or Qwen model (base 500,000 or 1,000,000) that was saved by version 5 is served by a program
#   with version 4, or by any reader that looks for rope_theta alone: its positions are wrong, and nothing says so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q transformers==5.24.0
export HF_HUB_OFFLINE=1
"$folder/env/bin/python" - "$folder" 2>>"$folder/log" <<'PY'
import json
import pathlib
import sys

from transformers import LlamaConfig

LlamaConfig(rope_theta=500_000.0).save_pretrained(sys.argv[1])
written = json.loads(pathlib.Path(sys.argv[1], "config.json").read_text())
print("written by 5.24.0:", {name: value for name, value in written.items() if "rope" in name})
assert "rope_theta" not in written and written["rope_parameters"]["rope_theta"] == 500_000
PY
"$folder/env/bin/pip" install -q transformers==4.57.1
"$folder/env/bin/python" - "$folder" 2>>"$folder/log" <<'PY'
import sys

from transformers import AutoConfig

config = AutoConfig.from_pretrained(sys.argv[1])
print("read by 4.57.1: rope_theta", config.rope_theta, "rope_parameters", config.rope_parameters)
assert config.rope_theta == 10_000 and config.rope_parameters["rope_theta"] == 500_000
PY
