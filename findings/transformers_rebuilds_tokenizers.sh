#!/usr/bin/env bash
# One would guess: where a folder has a tokenizer.json, transformers makes the tokens that it describes.
# Seen (transformers 5.24.0, tokenizers 0.23.3, 2026-11-27): under some classes transformers takes the vocabulary from
#   the file and builds normalizer and pre-tokenizer anew, as the class wants them. A byte-level BPE with a Lowercase
#   normalizer gives other ids for "ABC" under GPT2Tokenizer than under PreTrainedTokenizerFast, without a warning. For
#   model_type mistral, the same class takes the file as it is.
# Where it bites: a model that was trained with the library tokenizers is evaluated on other tokens than it learnt.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q transformers==5.24.0 tokenizers==0.23.3
HF_HUB_OFFLINE=1 "$folder/env/bin/python" - 2>"$folder/log" <<'PY'
import json
import pathlib
import tempfile

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer

pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
tokenizer = tokenizers.Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, []))
tokenizer.normalizer = normalizers.Lowercase()
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
expected, found = tokenizer.encode("ABC").ids, {}
with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    tokenizer.save(str(folder / "tokenizer.json"))
    for kind, cls in (("gpt2", "GPT2Tokenizer"), ("mistral", "GPT2Tokenizer"), ("gpt2", "PreTrainedTokenizerFast")):
        (folder / "config.json").write_text(json.dumps({"model_type": kind}))
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": cls}))
        found[kind, cls] = AutoTokenizer.from_pretrained(name).encode("ABC", add_special_tokens=False)
        print(f"model_type {kind}, class {cls}: {found[kind, cls]}; tokenizers: {expected}")
assert found["gpt2", "GPT2Tokenizer"] != expected
assert found["mistral", "GPT2Tokenizer"] == found["gpt2", "PreTrainedTokenizerFast"] == expected
PY
