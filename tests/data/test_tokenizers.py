import itertools
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from fiddlex.data import ByteTokenizer, JsonTokenizer, PieceDecoder, Tokenizer, make_tokenizer
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


@pytest.fixture(scope="module")
def byte_level_bpe(tmp_path_factory) -> Tokenizer:
    """As GPT-2's: tokens are pieces of UTF-8, and a space belongs to the word after it."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        ["the three thieves, 三つの 三"] * 9, trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet)
    )
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    tokenizer.save(str(path))
    return JsonTokenizer(path)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory) -> Tokenizer:
    """As Llama's: the first token of a text loses its space, and what has no token of its own is bytes."""
    vocab = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefg", "▁a", "▁be"]
    merges = [("▁", "a"), ("▁", "b"), ("▁b", "e")]
    model = models.BPE(
        {token: i for i, token in enumerate([*vocab, "▁b"])}, merges, byte_fallback=True, unk_token="<unk>"
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    strip = decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    path = tmp_path_factory.mktemp("sentencepiece") / "tokenizer.json"
    tokenizer.save(str(path))
    return JsonTokenizer(path)


def decoded(tokenizer, ids, after=()):
    """The pieces that the tokens add, one after another, without empty ones."""
    decoder = PieceDecoder(tokenizer, after)
    return [piece for piece in [*map(decoder.push, ids), decoder.flush()] if piece]


@pytest.mark.parametrize("name", ["bytes", "byte_level_bpe", "sentencepiece"])
@given(words=st.lists(st.text(st.sampled_from("abe三é🙂,"), min_size=1), min_size=2), cut=st.integers(0, 20))
def test_pieces_are_the_text(request, name, words, cut):
    tokenizer = ByteTokenizer() if name == "bytes" else request.getfixturevalue(name)
    prompt, text = " ".join(words[:cut]), " " * bool(words[:cut]) + " ".join(words[cut:])
    ids, start = tokenizer.encode(prompt + text).tolist(), tokenizer.encode(prompt).tolist()
    assert ids[: len(start)] == start
    pieces = decoded(tokenizer, ids[len(start) :], after=start)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_pieces_come_as_soon_as_they_can(byte_level_bpe):
    tokens = [byte_level_bpe.encode(character).tolist() for character in ["a", "é", "🙂"]]
    decoder = PieceDecoder(byte_level_bpe)
    pieces = [decoder.push(token) for token in itertools.chain(*tokens)]
    assert pieces == ["a", "", "é", "", "", "", "🙂"]


def test_pieces_cost_the_same_wherever_they_are():
    class Counting(ByteTokenizer):
        decoded = 0

        def decode(self, ids):
            self.decoded += len(ids)
            return super().decode(ids)

    tokenizer, text = Counting(), "é🙂x" * 1000
    assert "".join(decoded(tokenizer, tokenizer.encode(text))) == text
    assert tokenizer.decoded < 10 * len(text.encode())
