#!/usr/bin/env bash
# One would guess: a byte-level BPE tokenizer can encode any text, since it knows all 256 bytes.
# Seen (tokenizers 0.23.3, 2026-11-27): with the pre-tokenizer ByteLevel, BpeTrainer takes into the vocabulary only the
#   bytes that its texts have. A byte that they lack is left out of the ids without an error or an unknown token: "Zebra
#   7" comes back as "er". With initial_alphabet=ByteLevel.alphabet() nothing is lost.
# Where it bites: a tokenizer that was trained on a sample in one language drops letters of others, digits or emoji, and
#   a model is trained and scored on a shorter text. No loss counts what was left out.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q tokenizers==0.23.3
"$folder/env/bin/python" - <<'PY'
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

found = {}
for name, alphabet in (("bytes of the texts", []), ("all bytes", pre_tokenizers.ByteLevel.alphabet())):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["hello", "world"], trainer)
    found[name] = tokenizer.decode(tokenizer.encode("Zebra 7").ids)
    print(f"{name}: 'Zebra 7' comes back as {found[name]!r}")
assert found == {"bytes of the texts": "er", "all bytes": "Zebra 7"}
PY
