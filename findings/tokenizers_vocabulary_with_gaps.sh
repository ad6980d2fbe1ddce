#!/usr/bin/env bash
# One would guess: Tokenizer.add_tokens gives a new token an id that no token has.
# Seen (tokenizers 0.23.3, 2026-11-27): the new id is the number of tokens. In a vocabulary whose ids have gaps this id
#   may be taken. Then two tokens share it: both are encoded as this id, and it is decoded as the newer one. Nothing is
#   said. get_vocab_size() is the number of tokens too, which is less than the largest id plus one.
# Where it bites: a vocabulary from which tokens were taken out, or one with reserved ids, gets a padding token: a
#   word's embedding is also that of the padding. An embedding with get_vocab_size() rows is too small for such a
#   vocabulary.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q tokenizers==0.23.3
"$folder/env/bin/python" - <<'PY'
from tokenizers import Tokenizer, models

tokenizer = Tokenizer(models.WordLevel({"the": 0, "cat": 1, "sat": 3}, unk_token="the"))
print("before:", tokenizer.get_vocab(), "size", tokenizer.get_vocab_size(), "text of id 3:", tokenizer.decode([3]))
tokenizer.add_special_tokens(["<pad>"])
shared = tokenizer.encode("sat").ids, tokenizer.encode("<pad>").ids
decoded = tokenizer.decode([3], skip_special_tokens=False)
print("after: ids of 'sat' and '<pad>':", *shared, "text of id 3:", decoded)
assert shared == ([3], [3]) and decoded == "<pad>" and tokenizer.get_vocab_size() == 4
PY
