"""The file that keeps the tokens of text: what it holds, when it is made again, and what is never taken for it."""

import json
import os
import pathlib
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fiddlex.config import DataConfig
from fiddlex.data import ByteTokenizer, Corpus, corpus, load_corpus, token_cache
from fiddlex.errors import DataError


@pytest.fixture
def texts(tmp_path: pathlib.Path) -> pathlib.Path:
    for i in range(20):
        path = tmp_path / "texts" / f"{i}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"text number {i}" * (i + 1))
    return tmp_path / "texts"


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of documents of each call that encodes some."""
    calls: list[int] = []
    encode_batch = ByteTokenizer.encode_batch

    def counting(self: ByteTokenizer, texts: list[str]) -> list[np.ndarray]:
        calls.append(len(texts))
        return encode_batch(self, texts)

    monkeypatch.setattr(ByteTokenizer, "encode_batch", counting)
    return calls


def load(texts: pathlib.Path, cache: pathlib.Path | str = "", **fields: Any) -> Corpus:
    config = DataConfig(source=f"text:{texts}", eval_fraction=0.2, cache=str(cache), **fields)
    return load_corpus(config, vocab_size=256, seq_len=4)


def assert_same(one: Corpus, other: Corpus) -> None:
    for left, right in ((one.train, other.train), (one.heldout, other.heldout)):
        assert left.tokens.dtype == right.tokens.dtype
        np.testing.assert_array_equal(left.tokens, right.tokens)
        for name in ("num_bytes", "num_documents", "separator", "unit"):
            assert getattr(left, name) == getattr(right, name)
        np.testing.assert_array_equal(left.bounds, right.bounds)
    assert (one.fingerprint(), one.describe()) == (other.fingerprint(), other.describe())


def test_a_cached_corpus_is_the_same_and_is_tokenized_once(texts, tmp_path, encoded):
    plain = load(texts)
    del encoded[:]
    cached = load(texts, tmp_path / "cache")
    assert sum(encoded) == 20
    assert_same(cached, plain)
    assert_same(load(texts, tmp_path / "cache"), plain)
    assert sum(encoded) == 20
    assert isinstance(cached.train.tokens, np.memmap)


@pytest.mark.parametrize("fraction", [0.0, 0.5])
def test_empty_and_partial_streams(texts, tmp_path, fraction):
    config = DataConfig(source=f"text:{texts / '7.txt'}", eval_fraction=fraction)
    plain = load_corpus(config, vocab_size=256, seq_len=4)
    config.cache = str(tmp_path / "cache")
    assert_same(load_corpus(config, vocab_size=256, seq_len=4), plain)


def changed_text(texts: pathlib.Path) -> None:
    (texts / "3.txt").write_text("other")


def changed_in_place(texts: pathlib.Path) -> None:
    path = texts / "3.txt"
    path.write_text(path.read_text().replace("number", "NUMBER"))
    os.utime(path, ns=(0, 0))


def added_file(texts: pathlib.Path) -> None:
    (texts / "new.txt").write_text("more")


@pytest.mark.parametrize("change", [changed_text, changed_in_place, added_file])
def test_changed_files_are_tokenized_again(change: Callable[[pathlib.Path], None], texts, tmp_path):
    load(texts, tmp_path / "cache")
    change(texts)
    assert_same(load(texts, tmp_path / "cache"), load(texts))


def test_another_split_is_another_file(texts, tmp_path):
    load(texts, tmp_path / "cache")
    config = DataConfig(source=f"text:{texts}", eval_fraction=0.5, cache=str(tmp_path / "cache"))
    assert len(load_corpus(config, vocab_size=256, seq_len=4).heldout) > len(load(texts).heldout)


def cut(data: bytearray) -> None:
    del data[len(data) // 2 :]


def cut_by_a_byte(data: bytearray) -> None:
    del data[-1]


def flip_a_token(data: bytearray) -> None:
    data[10] ^= 1


def flip_the_description(data: bytearray) -> None:
    data[-40] ^= 1


@pytest.mark.parametrize("damage", [cut, cut_by_a_byte, flip_a_token, flip_the_description, bytearray.clear])
def test_a_damaged_file_is_made_again(damage: Callable[[bytearray], None], texts, tmp_path, caplog):
    load(texts, tmp_path / "cache")
    (file,) = (tmp_path / "cache").iterdir()
    data = bytearray(file.read_bytes())
    damage(data)
    file.write_bytes(data)
    assert_same(load(texts, tmp_path / "cache"), load(texts))
    assert f"{file} is damaged and is made again" in caplog.text


def test_a_file_of_something_else_is_not_taken(texts, tmp_path):
    load(texts, tmp_path / "cache")
    (file,) = (tmp_path / "cache").iterdir()
    changed_text(texts)
    load(texts, tmp_path / "cache")
    (other,) = set((tmp_path / "cache").iterdir()) - {file}
    os.replace(file, other)
    assert_same(load(texts, tmp_path / "cache"), load(texts))


def test_what_a_kill_leaves_is_not_taken_and_is_removed_later(texts, tmp_path, monkeypatch):
    def killed(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        patch.setattr(pathlib.Path, "unlink", lambda *arguments, **options: None)
        with pytest.raises(KeyboardInterrupt):
            load(texts, tmp_path / "cache")
    (left,) = (tmp_path / "cache").iterdir()
    assert left.suffix == ".tmp"
    os.utime(left, (0, 0))
    assert_same(load(texts, tmp_path / "cache"), load(texts))
    (file,) = (tmp_path / "cache").iterdir()
    assert file.suffix == ".tokens"


def test_a_folder_that_cannot_be_written(texts, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        DataError, match=r"^data\.source: Cannot write the tokens of text:.*or set data\.cache to another"
    ):
        load(texts, tmp_path / "file" / "cache")


def test_a_missing_source_is_told_as_without_a_cache(tmp_path):
    with pytest.raises(DataError, match=r"^data\.source: text:.*there is no such file or folder"):
        load(tmp_path / "nowhere", tmp_path / "cache")


def test_progress_is_counted(texts, monkeypatch):
    made: list[int] = []
    stream = corpus.encode_documents(corpus.read_text(texts), ByteTokenizer(), made.append)
    assert sum(made) == len(stream) - 19  # without the separators
    monkeypatch.setattr(token_cache, "_POST_S", -1.0)
    posted: list[object] = []
    monkeypatch.setattr(token_cache.processes, "post", lambda name, value: posted.append(value))
    report = token_cache._posting("name")
    report(3)
    report(4)
    assert posted == [{"made": 3}, {"made": 7}]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("dtype", "<i1"), ("dtype", "|O"), ("dtype", None), ("offset", -8), ("offset", 1.5), ("length", 2**62)),
        *(("length", -1), ("separator", "x"), ("num_bytes", [])),
    ],
)
def test_a_description_that_fiddlex_does_not_write_is_not_believed(field, value, texts, tmp_path, caplog):
    """Also where its checksums are right."""
    whole = load(texts, tmp_path / "cache")
    (file,) = (tmp_path / "cache").iterdir()
    data = file.read_bytes()
    length, _, magic = struct.unpack("<QI8s", data[-20:])
    described = json.loads(data[-20 - length : -20])
    described["streams"][0][field] = value
    text = json.dumps(described).encode()
    file.write_bytes(data[: -20 - length] + text + struct.pack("<QI8s", len(text), zlib.crc32(text), magic))
    assert_same(load(texts, tmp_path / "cache"), whole)
