"""Datasets of Hugging Face's `datasets`: folders of `save_to_disk`, and Parquet, Arrow and JSON Lines files.

They need the extra `hf`, which the extra `test` does not bring (docs/tests.md).
"""

import gzip
import json
import pathlib
import random
import shutil
import socket
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fiddlex.config import Config, DataConfig
from fiddlex.config.overrides import replaced
from fiddlex.data import Corpus, load_corpus, load_dataset
from fiddlex.errors import DataError
from tests.data.test_text_rows import TEXTS, sides

datasets = pytest.importorskip("datasets")
pa = pytest.importorskip("pyarrow")

import pyarrow.ipc  # noqa: E402
import pyarrow.parquet  # noqa: E402

datasets.disable_progress_bars()

ROWS = [*TEXTS[:30], "", None, *TEXTS[30:]]


def load(source: object, **fields) -> Corpus:
    return load_corpus(DataConfig(source=f"hf:{source}", **fields), vocab_size=256, seq_len=4)


def table(texts: list[str | None], kind: str = "string") -> "pa.Table":
    strings = pa.array(texts, pa.string())
    if kind == "dictionary":
        strings = strings.dictionary_encode()
    elif kind != "string":
        strings = strings.cast(getattr(pa, kind)())
    return pa.table({"id": list(range(len(texts))), "text": strings})


def save(path: pathlib.Path, texts: list[str | None]) -> str:
    datasets.Dataset.from_dict({"id": list(range(len(texts))), "text": texts}).save_to_disk(path)
    return "train"


def parquet(path: pathlib.Path, texts: list[str | None], kind: str = "string") -> str:
    path.mkdir(parents=True)
    pyarrow.parquet.write_table(table(texts, kind), path / "a.parquet", row_group_size=7)
    return "a.parquet"


def arrow_stream(path: pathlib.Path, texts: list[str | None], kind: str = "string") -> str:
    path.mkdir(parents=True)
    with pa.OSFile(str(path / "a.arrow"), "wb") as file, pa.ipc.new_stream(file, table(texts, kind).schema) as writer:
        writer.write_table(table(texts, kind), max_chunksize=7)
    return "a.arrow"


def arrow_file(path: pathlib.Path, texts: list[str | None], kind: str = "string") -> str:
    path.mkdir(parents=True)
    with pa.OSFile(str(path / "a.arrow"), "wb") as file, pa.ipc.new_file(file, table(texts, kind).schema) as writer:
        writer.write_table(table(texts, kind), max_chunksize=7)
    return "a.arrow"


def json_lines(path: pathlib.Path, texts: list[str | None], name: str = "a.jsonl") -> str:
    path.mkdir(parents=True)
    lines = [json.dumps({"id": i, "text": text}) + "\n" * (1 + i % 2) for i, text in enumerate(texts)]
    with (gzip.open if name.endswith(".gz") else open)(path / name, "wb") as file:
        file.write("".join(lines).encode())
    return name


def json_lines_in_gzip(path: pathlib.Path, texts: list[str | None]) -> str:
    return json_lines(path, texts, "a.jsonl.gz")


def json_lines_in_zstd(path: pathlib.Path, texts: list[str | None]) -> str:
    name = json_lines(path, texts)
    zstandard = pytest.importorskip("zstandard")
    (path / f"{name}.zst").write_bytes(zstandard.compress((path / name).read_bytes()))
    (path / name).unlink()
    return f"{name}.zst"


WRITERS: list[Callable[..., str]] = [
    save,
    parquet,
    arrow_stream,
    arrow_file,
    json_lines_in_gzip,
    json_lines_in_zstd,
    json_lines,
]


@pytest.mark.parametrize("write", WRITERS)
def test_rows_are_documents_on_the_side_that_their_name_decides(tmp_path, write):
    name = write(tmp_path / "data", ROWS)
    corpus = load(tmp_path / "data", eval_fraction=0.2)
    texts = [text or "" for text in ROWS]
    assert [bytes(stream.tokens) for stream in (corpus.train, corpus.heldout)] == sides(name, texts, 0.2)
    assert corpus.train.num_documents + corpus.heldout.num_documents == 60
    assert corpus.train.num_bytes + corpus.heldout.num_bytes == sum(len(text.encode()) for text in texts)


@given(texts=st.lists(st.none() | st.text(st.characters(codec="utf-8"), max_size=5), min_size=2, max_size=9))
@settings(max_examples=10)
def test_any_texts(tmp_path_factory, texts):
    texts = ["first", *texts]
    for write in WRITERS:
        path = tmp_path_factory.mktemp("any") / "data"
        write(path, texts)
        corpus = load(path, eval_fraction=0.0)
        assert bytes(corpus.train.tokens).decode() == "\0".join(text for text in texts if text)


@pytest.mark.parametrize("kind", ["large_string", "string_view", "dictionary"])
@pytest.mark.parametrize("write", [parquet, arrow_stream, arrow_file])
def test_kinds_of_strings(tmp_path, write, kind):
    write(tmp_path / "data", ROWS, kind)
    assert bytes(load(tmp_path / "data", eval_fraction=0.0).train.tokens).decode().split("\0") == TEXTS


def test_chosen_and_shuffled_rows(tmp_path):
    """A saved dataset may be a selection of rows in another order."""
    whole = datasets.Dataset.from_dict({"text": TEXTS}).shuffle(seed=1).select(range(5, 25))
    whole.save_to_disk(tmp_path / "data", num_shards=3)
    assert bytes(load(tmp_path / "data", eval_fraction=0.0).train.tokens).decode().split("\0") == whole["text"][:]


def streams(corpus: Corpus) -> list[list[str]]:
    return [bytes(stream.tokens).decode().split("\0") for stream in (corpus.train, corpus.heldout)]


@pytest.mark.parametrize("saved", [True, False])
def test_splits(tmp_path, saved):
    parts = {"train": TEXTS[:40], "validation": TEXTS[40:45], "test": TEXTS[45:50]}
    for name, texts in parts.items():
        if saved:
            save(tmp_path / name, texts)
        else:
            pyarrow.parquet.write_table(table(texts), tmp_path / f"{name}-00000-of-00001.parquet")
    if saved:
        (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": list(parts)}))
    file = "" if saved else "-00000-of-00001.parquet"
    assert streams(load(tmp_path)) == [parts["train"], parts["validation"]]
    assert streams(load(tmp_path, eval_fraction=0.0)) == [parts["train"], [""]]
    test = load(tmp_path, eval_source=f"hf:{tmp_path}/test{file}")
    assert streams(test) == [parts["train"], parts["test"]]
    shutil.rmtree(tmp_path / "validation") if saved else (tmp_path / f"validation{file}").unlink()
    if saved:
        (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    first = sides("train" if saved else f"train{file}", parts["train"], 0.3)
    assert [bytes(s.tokens) for s in (load(tmp_path, eval_fraction=0.3).train,)] == first[:1]
    assert streams(load(tmp_path, eval_source=f"hf:{tmp_path}")) == [parts["train"], parts["test"]]


def test_splits_of_which_none_fits(tmp_path):
    halves = {name: datasets.Dataset.from_dict({"text": TEXTS}) for name in ("first", "second")}
    datasets.DatasetDict(halves).save_to_disk(tmp_path / "data")
    message = r"has the splits 'first', 'second', and none is 'train'\. Name the folder or the file of the split"
    with pytest.raises(DataError, match=message):
        load(tmp_path / "data")
    assert streams(load(tmp_path / "data" / "second", eval_fraction=0.0))[0] == TEXTS
    with pytest.raises(DataError, match=r"data\.eval_source: .* and none is 'validation' or 'test'"):
        load(tmp_path / "data" / "first", eval_source=f"hf:{tmp_path}/data")


@pytest.mark.parametrize("write", WRITERS)
def test_a_column_that_is_not_there_or_not_of_strings(tmp_path, write):
    write(tmp_path / "data", TEXTS)
    with pytest.raises(DataError, match=r"'body' \(data\.text_column=body\).*'id', 'text'.* Set data\.text_column"):
        load(tmp_path / "data", text_column="body")
    with pytest.raises(DataError, match=r"'id' holds a? ?int(64)?, and must hold (a string|strings)"):
        load(tmp_path / "data", text_column="id")


def test_nothing_is_downloaded_or_written(tmp_path, monkeypatch):
    def connect(*args):
        raise AssertionError(f"a connection to {args}")

    for write in WRITERS:
        write(tmp_path / write.__name__, TEXTS)
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", connect)
    monkeypatch.setenv("HOME", str(tmp_path))
    for write in WRITERS:
        assert streams(load(tmp_path / write.__name__, eval_fraction=0.0))[0] == TEXTS
    for name in ("squad", "https://huggingface.co/datasets/squad", "hf://datasets/squad"):
        with pytest.raises(
            DataError, match=r"there is no such folder\. fiddlex reads local datasets and downloads none"
        ):
            load(name)
    assert sorted(tmp_path.rglob("*")) == before


def test_what_is_no_dataset(tmp_path):
    with pytest.raises(DataError, match=r"there is no dataset in the folder\. Give a folder that save_to_disk"):
        load(tmp_path)
    (tmp_path / "a.csv").write_text("text\n")
    with pytest.raises(DataError, match=r"a\.csv: the file is no dataset\. Give .* \.arrow, \.jsonl, .* files"):
        load(tmp_path / "a.csv")
    (tmp_path / "a.json").write_text('{"text": "some text"}\n')
    assert streams(load(tmp_path / "a.json", eval_fraction=0.0))[0] == ["some text"]
    with pytest.raises(DataError, match=r"there is no dataset in the folder"):  # it may describe a dataset
        load(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"text": "some text"}\n[1]\n')
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: .* is not an object\."):
        load(tmp_path, eval_fraction=0.0)
    for name in (".parquet", ".arrow"):
        (tmp_path / f"a{name}").write_text("some text that is of another format, and longer than any header. " * 9)
        with pytest.raises(DataError, match=r"Copy or write it again"):
            load(tmp_path / f"a{name}")
    save(tmp_path / "b", TEXTS)
    (tmp_path / "b" / "state.json").write_text("{}")
    with pytest.raises(DataError, match=r"b is damaged, or not what its name says \("):
        load(tmp_path / "b")


def outcomes(path: pathlib.Path, damaged: list[bytes], source: pathlib.Path) -> Counter[str]:
    """How often each of the damaged contents of a file is refused, or read as other texts or the same."""
    whole, found = path.read_bytes(), Counter[str]()
    for data in damaged:
        path.write_bytes(data)
        try:
            tokens = bytes(load(source, eval_fraction=0.0).train.tokens)
            found["same" if tokens == b"\0".join(text.encode() for text in TEXTS) else "other"] += 1
        except DataError:
            found["refused"] += 1
    path.write_bytes(whole)
    return found


def data_file(write: Callable[..., str], folder: pathlib.Path) -> pathlib.Path:
    name = write(folder, ROWS)
    return folder / ("data-00000-of-00001.arrow" if write is save else name)


@pytest.mark.parametrize("write", WRITERS[:-1])
def test_files_cut_at_any_byte_are_refused(tmp_path, write):
    file = data_file(write, tmp_path / "data")
    whole = file.read_bytes()
    sizes = range(len(whole) - 1, -1, -1 - len(whole) // 150)
    found = outcomes(file, [whole[:size] for size in [0, *sizes]], tmp_path / "data")
    assert found == {"refused": 1 + len(sizes)}


@pytest.mark.parametrize("name", ["dataset_dict.json", "train/state.json", "train/dataset_info.json"])
def test_descriptions_of_saved_datasets_cut_at_any_byte_are_refused(tmp_path, name):
    datasets.DatasetDict(train=datasets.Dataset.from_dict({"text": TEXTS})).save_to_disk(tmp_path / "data")
    file = tmp_path / "data" / name
    whole = file.read_bytes()
    found = outcomes(file, [whole[:size] for size in range(len(whole))], tmp_path / "data")
    assert found == {"refused": len(whole)}


def test_json_lines_cut_within_a_line_are_refused(tmp_path):
    """A cut between lines cannot be noticed: what is left is a whole file of fewer lines."""
    file = data_file(json_lines, tmp_path / "data")
    whole = file.read_bytes()
    within = [size for size in range(1, len(whole)) if whole[size - 1 : size] not in (b"}", b"\n")]
    found = outcomes(file, [whole[:size] for size in within[1::9]], tmp_path / "data")
    assert found == {"refused": len(within[1::9])}


@pytest.mark.parametrize("write", WRITERS)
def test_changed_bits_never_crash(tmp_path, write):
    """Other errors than DataError, and crashes, would fail this test."""
    file = data_file(write, tmp_path / "data")
    whole, rng, damaged = file.read_bytes(), random.Random(0), []
    for _ in range(200):
        data = bytearray(whole)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        damaged.append(bytes(data))
    found = outcomes(file, damaged, tmp_path / "data")
    assert found["refused"] > 0


def test_a_run_on_a_dataset(tmp_path, tiny_config: Config):
    save(tmp_path / "data", TEXTS)
    dataset = load_dataset(replaced(tiny_config, {"data.source": f"hf:{tmp_path / 'data'}"}).validate())
    assert len(dataset.train) > 0
    assert dataset.heldout is not None
    np.testing.assert_array_equal(
        dataset.train.example(0, epoch=0)["tokens"], np.frombuffer(sides("train", TEXTS, 0.05)[0], np.uint8)[:16]
    )
