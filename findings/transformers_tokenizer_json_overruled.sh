#!/usr/bin/env bash
# One would guess: with the class PreTrainedTokenizerFast, transformers tokenizes as tokenizer.json says, and
#   tokenizer_config.json adds what is not in it, such as a chat template.
# Seen (transformers 5.24.0, tokenizers 0.23.3, 2026-11-28): where `added_tokens_decoder` of tokenizer_config.json
#   describes a token that tokenizer.json has, its description wins: with rstrip=true there, a space after the token is
#   lost, and so are the ids of that space. Nothing is said of it.
# Where it bites: every program that reads tokenizer.json with the library tokenizers, as most servers and trainers do,
#   has other ids than transformers where the two files differ, as after an edit of one of them by hand.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q transformers==5.24.0 tokenizers==0.23.3
HF_HUB_OFFLINE=1 "$folder/env/bin/python" - "$folder/tokenizer" <<'PY'
import json
import os
import sys

import tokenizers
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer

folder = sys.argv[1]
os.mkdir(folder)
made = Tokenizer(models.BPE({"a": 0, "b": 1, "Ġ": 2, "<end>": 3}, []))
made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
made.add_special_tokens([AddedToken("<end>")])
made.save(f"{folder}/tokenizer.json")
described = {"content": "<end>", "lstrip": False, "rstrip": True, "single_word": False, "normalized": False, "special": True}
said = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": {"3": described}}
with open(f"{folder}/tokenizer_config.json", "w") as file:
    json.dump(said, file)
ids = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json").encode("a<end> b").ids
theirs = AutoTokenizer.from_pretrained(folder)("a<end> b")["input_ids"]
print(f"tokenizers: {ids}; transformers: {theirs}")
assert (ids, theirs) == ([0, 3, 2, 1], [0, 3, 1])
PY
