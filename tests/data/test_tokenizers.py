from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from fiddlex.data import ByteTokenizer, JsonTokenizer, make_tokenizer
from fiddlex.errors import ConfigError, DataError

WORDS = {"[UNK]": 0, "fold": 1, "bind": 2, "vote": 3}


def save_tokenizer(path: Path, vocab: dict[str, int], **lengths: int) -> Path:
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if lengths:
        tokenizer.enable_truncation(lengths["truncation"])
        tokenizer.enable_padding(length=lengths["padding"])
    tokenizer.save(str(path))
    return path


@given(st.text())
def test_bytes_round_trip(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert ids.ndim == 1
    assert ids.tolist() == list(text.encode("utf-8"))
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids.tolist()) == text


def test_bytes_cut_inside_a_character_decode():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode("aé")[:-1]) == "a�"


def test_json_encodes_and_decodes(tmp_path):
    tokenizer = JsonTokenizer(save_tokenizer(tmp_path / "tokenizer.json", WORDS))
    ids = tokenizer.encode("vote fold nonsense bind")
    assert ids.dtype == np.int32
    assert ids.tolist() == [3, 1, 0, 2]
    assert tokenizer.decode(ids) == "vote fold [UNK] bind"
    assert tokenizer.separator is None
    assert tokenizer.vocab_size == 4


def test_json_batch_equals_one_by_one(tmp_path):
    tokenizer = JsonTokenizer(save_tokenizer(tmp_path / "tokenizer.json", WORDS))
    texts = ["vote fold", "", "bind bind bind"]
    batch = tokenizer.encode_batch(texts)
    assert [ids.tolist() for ids in batch] == [[3, 1], [], [2, 2, 2]]
    assert [ids.tolist() for ids in batch] == [tokenizer.encode(text).tolist() for text in texts]


@pytest.mark.parametrize("name", ["<|endoftext|>", "</s>", "[SEP]"])
def test_json_separator(tmp_path, name):
    path = save_tokenizer(tmp_path / "tokenizer.json", {**WORDS, name: 4})
    assert JsonTokenizer(path).separator == 4


def test_json_end_of_text_comes_before_sep(tmp_path):
    path = save_tokenizer(tmp_path / "tokenizer.json", {**WORDS, "[SEP]": 4, "<|endoftext|>": 5})
    assert JsonTokenizer(path).separator == 5


def test_json_vocab_size_counts_gaps(tmp_path):
    path = save_tokenizer(tmp_path / "tokenizer.json", {**WORDS, "last": 9})
    assert JsonTokenizer(path).vocab_size == 10


def test_json_truncation_and_padding_of_the_file_are_off(tmp_path):
    path = save_tokenizer(tmp_path / "tokenizer.json", WORDS, truncation=2, padding=6)
    tokenizer = JsonTokenizer(path)
    assert tokenizer.encode("vote fold bind").tolist() == [3, 1, 2]
    assert [ids.tolist() for ids in tokenizer.encode_batch(["vote fold bind", "vote"])] == [[3, 1, 2], [3]]


def test_make_tokenizer(tmp_path):
    path = save_tokenizer(tmp_path / "tokenizer.json", WORDS)
    assert isinstance(make_tokenizer("bytes"), ByteTokenizer)
    assert make_tokenizer(str(path)).vocab_size == 4


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ("byte", DataError, "data.tokenizer='byte': {folder}/byte does not exist. Use 'bytes' or the path of a"),
        (".", DataError, "data.tokenizer='.': {folder} is a folder. Use 'bytes' or the path of a tokenizer.json"),
        ("", ConfigError, "data.tokenizer is empty. Use 'bytes' or the path of a tokenizer.json"),
    ],
)
def test_no_file(tmp_path, monkeypatch, spec, error, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error) as raised:
        make_tokenizer(spec)
    assert str(raised.value).startswith(message.format(folder=tmp_path))


@pytest.mark.parametrize("content", ["not json", '{"the": 0}', ""])
def test_not_a_tokenizer(tmp_path, content):
    path = tmp_path / "vocab.json"
    path.write_text(content)
    with pytest.raises(DataError, match=r"vocab\.json' is not a JSON file of the tokenizers library .*not its vocab"):
        make_tokenizer(str(path))
