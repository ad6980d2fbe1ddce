"""Small tokenizers with the special tokens of BERT and RoBERTa."""

from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from fiddlex.data import JsonTokenizer

BERT = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]"]
ROBERTA = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


@pytest.fixture(scope="session")
def saved(tmp_path_factory) -> Callable[[tokenizers.Tokenizer], JsonTokenizer]:
    """Brings a tokenizer of the library into fiddlex's form, by way of a file."""

    def save(tokenizer: tokenizers.Tokenizer) -> JsonTokenizer:
        path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
        tokenizer.save(str(path))
        return JsonTokenizer(path)

    return save


@pytest.fixture(scope="session")
def wordpiece(saved, text_file: Path) -> JsonTokenizer:
    """As BERT's: ## continues a word, and punctuation is apart."""
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=500, special_tokens=BERT, show_progress=False)
    tokenizer.train_from_iterator([text_file.read_text(encoding="utf-8")], trainer)
    return saved(tokenizer)


@pytest.fixture(scope="session")
def roberta(saved, text_file: Path) -> JsonTokenizer:
    """As RoBERTa's: byte-level BPE, where a space belongs to the word after it."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=ROBERTA, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text_file.read_text(encoding="utf-8"), "三。 " * 999], trainer)
    return saved(tokenizer)


@pytest.fixture(scope="session")
def numbered(saved) -> JsonTokenizer:
    """A word for each id from 5 on, below 2000; multiples of 7 end sentences."""
    words = {f"w{i}" + "." * (i % 7 == 0): i for i in range(len(BERT), 2000)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(dict(zip(BERT, range(5), strict=True)) | words, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(BERT)
    return saved(tokenizer)
