import os
import subprocess
import sys

import numpy as np
import plain
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fiddlex.data.megatron import order as order_module
from fiddlex.data.megatron.index_file import open_indexed
from fiddlex.data.megatron.order import document_order
from fiddlex.data.megatron.packing import PackedDocuments
from fiddlex.data.megatron.source import split_edges


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


def numbered(lengths):
    """Documents of ids that all differ."""
    ids = iter(range(sum(lengths)))
    return [[next(ids) for _ in range(length)] for length in lengths]


def shuffled(first, last, seed):
    order = np.arange(first, last, dtype=np.int32)  # the dtype that Megatron shuffles
    np.random.RandomState(seed).shuffle(order)
    return order.tolist()


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=12), seq_len=st.integers(1, 11), data=st.data())
def test_windows_are_those_of_the_concatenation(tmp_path_factory, lengths, seq_len, data):
    first = data.draw(st.integers(0, len(lengths) - 1))
    last = data.draw(st.integers(first + 1, len(lengths)))
    seed = data.draw(st.integers(0, 2**31 - 1))
    documents = numbered(lengths)
    prefix = plain.write(tmp_path_factory.mktemp("data") / "a", [[document] for document in documents], "int32")
    opened = open_indexed(prefix)
    packed = PackedDocuments(opened, document_order(opened, first, last, seed=seed), seq_len)
    expected = plain.samples(documents, shuffled(first, last, seed), seq_len)
    assert [packed.read(index).tolist() for index in range(len(packed))] == expected
    for index, window in enumerate(expected):
        example = packed.example(index, epoch=3)
        assert example["tokens"].tolist() == window[:-1]
        assert example["targets"].tolist() == window[1:]
        assert example["weights"].tolist() == [1.0] * seq_len
        assert [value.dtype for value in example.values()] == [np.int32, np.int32, np.float32]
    with pytest.raises(IndexError):
        packed.example(len(packed), epoch=0)


@pytest.mark.parametrize("dtype", ["int64", "int8"])
def test_ids_that_no_vocabulary_has_stay_outside(tmp_path, dtype):
    ids = [0, 2**32, -(2**40), 2**31 - 1] if dtype == "int64" else [0, -1, -128, 127]
    opened = open_indexed(plain.write(tmp_path / "a", [[ids]], dtype))
    example = PackedDocuments(opened, document_order(opened, 0, 1, seed=0), 3).example(0, epoch=0)
    window = np.append(example["tokens"], example["targets"][-1:])
    assert (window.view(np.uint32) >= 2**31).tolist() == [False, True, True, False]
    assert window[[0, 3]].tolist() == [ids[0], ids[3]]


@pytest.fixture
def dataset(tmp_path):
    return open_indexed(plain.write(tmp_path / "a", [[[n] * (n % 5)] for n in range(100)]))


def files_below(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_the_order_is_made_once_for_each_dataset_range_and_seed(tmp_path, dataset, monkeypatch):
    first = document_order(dataset, 0, 90, seed=1)
    others = [document_order(dataset, *edges, seed=seed) for edges, seed in (((0, 90), 2), ((0, 91), 1), ((1, 90), 1))]
    cached = files_below(tmp_path / "a-cache")
    assert len(cached) == 4
    assert all(name.startswith("order-") for name in cached)
    monkeypatch.setattr(order_module, "_shuffled", None)  # would fail if it were called
    again = document_order(dataset, 0, 90, seed=1)
    assert again.order.tolist() == first.order.tolist() == shuffled(0, 90, 1)
    assert again.places.tolist() == first.places.tolist()
    assert len({tuple(each.order.tolist()) for each in (first, *others)}) == 4


@pytest.mark.parametrize("damage", [b"PK\3\4", b"\x93NUMPY\1\0\x76\0{'descr': '<i8', (", b""])
def test_a_cached_order_with_another_header_is_made_again(tmp_path, dataset, damage):
    first = document_order(dataset, 0, 90, seed=1)
    (name,) = files_below(tmp_path / "a-cache")
    file = tmp_path / "a-cache" / name
    whole = file.read_bytes()
    file.write_bytes(damage + whole[len(damage) :] if damage else b"")
    assert document_order(dataset, 0, 90, seed=1).order.tolist() == first.order.tolist()
    assert file.read_bytes() == whole


def test_another_dataset_under_the_same_name_has_another_order(tmp_path, dataset):
    before = document_order(dataset, 0, 100, seed=0)
    plain.write(tmp_path / "a", [[[n] * ((n + 1) % 5)] for n in range(100)])
    after = document_order(open_indexed(tmp_path / "a"), 0, 100, seed=0)
    assert before.places.tolist() != after.places.tolist()


def test_a_damaged_order_is_made_again(tmp_path, dataset):
    made = document_order(dataset, 0, 100, seed=0)
    (file,) = (tmp_path / "a-cache").iterdir()
    whole = file.read_bytes()
    sizes = [*range(0, 200), *range(200, len(whole), 97)]
    flips = range(0, len(whole), 61)
    for size in sizes:
        file.write_bytes(whole[:size])
        assert document_order(dataset, 0, 100, seed=0).order.tolist() == made.order.tolist()
        assert file.read_bytes() == whole
    for place in flips:
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        found = document_order(dataset, 0, 100, seed=0)
        assert (found.order.tolist(), found.places.tolist()) == (made.order.tolist(), made.places.tolist())
    assert len(sizes) + len(flips) > 230


def test_where_nothing_can_be_written_beside_the_data(tmp_path, dataset):
    (tmp_path / "a-cache").write_text("not a folder")
    made = document_order(dataset, 0, 100, seed=0)
    assert [name.partition("-")[0] for name in files_below(tmp_path / "home")] == ["fiddlex/order"]
    (tmp_path / "home" / "fiddlex").rename(tmp_path / "gone")
    (tmp_path / "home" / "fiddlex").write_text("not a folder")
    assert document_order(dataset, 0, 100, seed=0).order.tolist() == made.order.tolist()


@pytest.mark.long
def test_several_processes_may_make_the_same_order(tmp_path, dataset):
    code = (
        "import sys; from pathlib import Path\n"
        "from fiddlex.data.megatron.index_file import open_indexed\n"
        "from fiddlex.data.megatron.order import document_order\n"
        "print(document_order(open_indexed(Path(sys.argv[1])), 0, 100, seed=0).order.tolist())"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "a")], stdout=subprocess.PIPE, env=os.environ)
        for _ in range(2)
    ]
    assert {process.communicate()[0] for process in running} == {f"{shuffled(0, 100, 0)}\n".encode()}
    assert len(files_below(tmp_path / "a-cache")) == 1


@given(count=st.integers(0, 10**7), numbers=st.lists(st.integers(0, 1000), min_size=1, max_size=3).filter(any))
def test_splits_cover_the_documents(count, numbers):
    shares = [number / sum(numbers) for number in numbers]
    edges = split_edges(shares, count)
    assert (edges[0], edges[-1]) == (0, count)
    assert edges == sorted(edges)
    for first, last, share in zip(edges[:-1], edges[1:], shares, strict=True):
        assert abs(last - first - share * count) <= 1.001


def test_a_split_by_hand():
    assert split_edges([0.969, 0.03, 0.001], 1000) == [0, 969, 999, 1000]
    assert split_edges([0.969, 0.03, 0.001], 10) == [0, 10, 10, 10]
    assert split_edges([0.5, 0.5], 5) == [0, 2, 5]  # 2.5 is rounded to even, as Megatron does
