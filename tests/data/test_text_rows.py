"""Rows as documents: their sides and splits, tokens in a temporary file, and ArrayRecord files."""

import hashlib
import json
import pathlib
import random
import sys
import tempfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fiddlex.config import DataConfig
from fiddlex.data import ByteTokenizer, Corpus, Document, load_corpus, token_buffer
from fiddlex.data.corpus import encode_documents
from fiddlex.data.text_rows import files_by_split
from fiddlex.errors import ConfigError, DataError

array_records = pytest.importorskip("array_record.python.array_record_module")  # grain brings it, but not on Windows

TEXTS = [f"text {i} – é. " * (1 + i % 5) for i in range(60)]


def load(source: object, **fields) -> Corpus:
    return load_corpus(DataConfig(source=str(source), **fields), vocab_size=256, seq_len=4)


def write(path: pathlib.Path, records: list[bytes], options: str = "group_size:1") -> pathlib.Path:
    writer = array_records.ArrayRecordWriter(str(path), options)
    for record in records:
        writer.write(record)
    writer.close()
    return path


def sides(name: str, texts: list[str], fraction: float) -> list[bytes]:
    """The oracle: the bytes of both streams, by the definition of a document's side."""
    documents: list[list[str]] = [[], []]
    for i, text in enumerate(texts):
        digest = hashlib.sha256(f"{name}:{i}".encode()).hexdigest()
        if text:
            documents[int(digest[:12], 16) / 16**12 < fraction].append(text)
    return ["\0".join(side).encode() for side in documents]


def example(**features: bytes) -> bytes:
    """A tf.Example of lists of one string, by the rules of protocol buffers; every part is shorter than 128 bytes."""

    def field(tag: int, data: bytes) -> bytes:
        return bytes([tag, len(data)]) + data

    entries = [
        field(10, field(10, name.encode()) + field(18, field(10, field(10, value)))) for name, value in features.items()
    ]
    return field(10, b"".join(entries))


@pytest.mark.parametrize("options", ["group_size:1", "group_size:7,uncompressed"])
@pytest.mark.parametrize("kind", ["text", "json"])
def test_records_are_documents_on_the_side_that_their_name_decides(tmp_path, kind, options):
    texts = [*TEXTS[:30], "", *TEXTS[30:]]
    records = [json.dumps({"id": 3, "text": text}).encode() if kind == "json" else text.encode() for text in texts]
    path = write(tmp_path / "a.array_record", records, options)
    corpus = load(f"array_record:{path}", eval_fraction=0.2)
    assert [bytes(stream.tokens) for stream in (corpus.train, corpus.heldout)] == sides(path.name, texts, 0.2)
    assert corpus.train.num_documents + corpus.heldout.num_documents == 60
    assert corpus.train.num_bytes + corpus.heldout.num_bytes == sum(len(text.encode()) for text in texts)
    assert " rows, " in corpus.describe()


def test_a_folder_of_records_has_splits(tmp_path):
    for name, part in {"c4-train": TEXTS[:20], "c4-validation": TEXTS[20:25], "c4-test": TEXTS[25:30]}.items():
        for i in range(2):
            write(tmp_path / f"{name}.array_record-0000{i}-of-00002", [text.encode() for text in part[i::2]])
    corpus = load(f"array_record:{tmp_path}")
    assert bytes(corpus.train.tokens).decode().split("\0") == TEXTS[:20:2] + TEXTS[1:20:2]
    assert bytes(corpus.heldout.tokens).decode().split("\0") == TEXTS[20:25:2] + TEXTS[21:25:2]
    assert len(load(f"array_record:{tmp_path}", eval_fraction=0.0).heldout) == 0
    other = load("stdlib", eval_source=f"array_record:{tmp_path}").heldout
    assert bytes(other.tokens) == bytes(corpus.heldout.tokens)
    one = load(f"array_record:{tmp_path}", eval_source=f"array_record:{tmp_path}/c4-test.array_record-00000-of-00002")
    assert bytes(one.heldout.tokens).decode().split("\0") == TEXTS[25:30:2]


def test_keys_of_records(tmp_path):
    path = write(tmp_path / "a.array_record", [b'{"content": "abc", "id": 1}', b'{"id": 2, "content": null}'] * 40)
    corpus = load(f"array_record:{path}", text_column="content", eval_fraction=0.0)
    assert bytes(corpus.train.tokens) == b"\0".join([b"abc"] * 40)
    with pytest.raises(DataError, match=r"record 0 has no key 'text' .*It has 'content', 'id'\. Set data\.text_column"):
        load(f"array_record:{path}")
    with pytest.raises(DataError, match=r"record 0: 'id' holds a int, and must hold a string"):
        load(f"array_record:{path}", text_column="id")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (example(text=b"some text", number=b"12"), r"record 1 is a tf\.Example protocol buffer.*UTF-8 text or a JSON"),
        (b"\x93NUMPY\x01", r"record 1 is not UTF-8: byte 0x93 at offset 0\. A record is a UTF-8 text or a JSON"),
    ],
)
def test_records_of_another_kind(tmp_path, record, message):
    with pytest.raises(DataError, match=message):
        load(f"array_record:{write(tmp_path / 'a.array_record', [b'text', record])}", eval_fraction=0.0)
    with pytest.raises(DataError, match=message.replace("record 1", "record 0")):
        load(f"array_record:{write(tmp_path / 'b.array_record', [record])}")
    objects = write(tmp_path / "c.array_record", [b'{"text": "a"}', record])
    with pytest.raises(DataError, match="record 1 is not a JSON object, and record 0 of the file is one"):
        load(f"array_record:{objects}", eval_fraction=0.0)


@given(st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=40), min_size=1, max_size=4))
def test_texts_are_not_taken_for_protocol_buffers(texts):
    from fiddlex.data.array_records import _is_tf_example

    for text in texts:
        for begun in (text, f"\n{text}", f"\n\n{text}", "\n" * len(text)):
            assert not _is_tf_example(begun.encode())
    assert _is_tf_example(example(**{f"key{i}": text.encode()[:20] for i, text in enumerate(texts[:2])}))


def test_files_that_are_not_there_or_not_records(tmp_path):
    with pytest.raises(DataError, match=r"data\.source: array_record:.*nowhere: there is no such file or folder"):
        load(f"array_record:{tmp_path}/nowhere")
    with pytest.raises(DataError, match=r"the folder has no file with \.array_record in its name"):
        load(f"array_record:{tmp_path}")
    (tmp_path / "a.array_record").write_text("text " * 40_000)
    with pytest.raises(DataError, match=r"a\.array_record is not an ArrayRecord file, or is damaged \("):
        load(f"array_record:{tmp_path}")
    write(tmp_path / "a.array_record", [])
    with pytest.raises(DataError, match="has 0 tokens for training"):
        load(f"array_record:{tmp_path}")
    with pytest.raises(ConfigError, match="is not a data source"):
        DataConfig(source="array_record:").validate()


def test_truncated_and_damaged_records(tmp_path):
    """A file cut anywhere is an error; with a changed bit it is one, or the bit changes no text."""
    path = write(tmp_path / "a.array_record", [text.encode() for text in TEXTS])
    whole, rng = path.read_bytes(), random.Random(0)
    tokens = bytes(load(f"array_record:{path}", eval_fraction=0.0).train.tokens)
    for size in [0, 1, 2**16 - 1, 2**16, len(whole) - 1, *rng.sample(range(len(whole)), 120)]:
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match="is not an ArrayRecord file, or is damaged"):
            load(f"array_record:{path}", eval_fraction=0.0)
    used = [i for i, byte in enumerate(whole) if byte]
    refused = 0
    for place in rng.sample(used, 120):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            assert bytes(load(f"array_record:{path}", eval_fraction=0.0).train.tokens) == tokens
        except DataError:
            refused += 1
    assert refused > 60


def test_splits_by_the_names_of_files(tmp_path):
    names = {
        "train": ["data/train-0.x", "notes.x", "pretrained.x", "Training.x", "contest.x"],
        "validation": ["c-val.x", "dev/a.x", "validation.x"],
        "test": ["test_0.x"],
    }
    for name in [name for of_split in names.values() for name in of_split] + [".hidden/train.x", "train.y"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = files_by_split(tmp_path, lambda name: name.endswith(".x"))
    assert {split: [name for name, _ in files] for split, files in found.items()} == {
        split: sorted(of_split) for split, of_split in names.items()
    }


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(1, 12))
def test_tokens_in_a_temporary_file_are_those_in_memory(lengths, limit):
    documents = [Document(str(i), "abcdefghi"[:length]) for i, length in enumerate(lengths)]
    whole = encode_documents(documents, ByteTokenizer())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_buffer, "_MEMORY_TOKENS", limit)
        stream = encode_documents(iter(documents), ByteTokenizer())
    assert stream.tokens.dtype == np.uint8
    np.testing.assert_array_equal(stream.tokens, whole.tokens)
    assert isinstance(stream.tokens, np.memmap) == (len(whole) > limit)
    assert (stream.num_bytes, stream.num_documents) == (sum(lengths), len(lengths))


def test_no_room_for_a_temporary_file(tmp_path, monkeypatch):
    monkeypatch.setattr(token_buffer, "_MEMORY_TOKENS", 3)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"Cannot write tokens to a temporary file in .*nowhere: No such file.*TMPDIR"):
        encode_documents([Document("a", "some text")], ByteTokenizer())


def test_without_the_library_of_datasets(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        DataError, match=r"data\.source: hf:.*takes the extra `hf` \(.* -m pip install 'fiddlex\[hf\]'\)"
    ):
        load(f"hf:{tmp_path}")
