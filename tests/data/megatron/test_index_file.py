import itertools
import os
import struct
import tracemalloc

import numpy as np
import plain
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fiddlex.data.megatron.builder import indexed_builder, smallest_dtype
from fiddlex.data.megatron.index_file import open_indexed
from fiddlex.errors import DataError

INTEGERS = sorted(plain.LETTERS)
DOCUMENTS = st.lists(st.lists(st.lists(st.integers(0, 127), max_size=6), max_size=3), max_size=6)


def documents_of(data):
    """What `IndexedTokens` says, in the form of `plain.read`."""
    starts = [data.first_token(number) for number in range(len(data.lengths) + 1)]
    sequences = [data.tokens[first:last].tolist() for first, last in itertools.pairwise(starts)]
    assert [len(each) for each in sequences] == data.lengths.tolist()
    return [sequences[first:last] for first, last in itertools.pairwise(data.documents)]


@given(documents=DOCUMENTS, dtype=st.sampled_from(INTEGERS))
def test_reads_what_struct_writes(tmp_path_factory, documents, dtype):
    prefix = plain.write(tmp_path_factory.mktemp("data") / "a.b", documents, dtype)  # a dot belongs to the prefix
    data = open_indexed(prefix)
    assert documents_of(data) == documents
    assert data.tokens.dtype == dtype
    assert not (len(data.tokens) and data.tokens.flags.writeable)
    joined = [[token for sequence in document for token in sequence] for document in documents]
    bounds = data.bounds(0, len(documents))
    assert [data.tokens[first:last].tolist() for first, last in bounds] == [each for each in joined if each]
    half = len(documents) // 2
    assert np.concatenate([data.bounds(0, half), data.bounds(half, len(documents))]).tolist() == bounds.tolist()


@given(documents=st.lists(st.lists(st.integers(0, 127), max_size=9), max_size=9), dtype=st.sampled_from(INTEGERS))
def test_struct_reads_what_the_builder_writes(tmp_path_factory, documents, dtype):
    folder = tmp_path_factory.mktemp("data")
    with indexed_builder(folder / "a", dtype=np.dtype(dtype)) as builder:
        for document in documents:
            builder.add(np.array(document, np.int64))
    assert plain.read(folder / "a") == [[each] for each in documents]
    with indexed_builder(folder / "twice", dtype=np.dtype(dtype)) as builder:
        builder.add_dataset(folder / "a")
        builder.add_dataset(folder / "a")
    assert plain.read(folder / "twice") == [[each] for each in documents * 2]
    assert sorted(each.name for each in folder.iterdir()) == ["a.bin", "a.idx", "twice.bin", "twice.idx"]


def test_each_dtype_holds_its_limits(tmp_path):
    for dtype in INTEGERS:
        limits = np.iinfo(dtype)
        with indexed_builder(tmp_path / dtype, dtype=np.dtype(dtype)) as builder:
            builder.add(np.array([limits.min, limits.max]))
        assert plain.read(tmp_path / dtype) == [[[limits.min, limits.max]]]
        assert open_indexed(tmp_path / dtype).tokens.tolist() == [limits.min, limits.max]
    assert [smallest_dtype(size).name for size in (256, 257, 65_536, 65_537)] == ["uint8", "uint16", "uint16", "int32"]


def test_an_id_that_the_dtype_cannot_hold_leaves_no_file(tmp_path):
    def build(documents, dtype="uint8"):
        with indexed_builder(tmp_path / "a", dtype=np.dtype(dtype)) as builder:
            for document in documents:
                builder.add(np.array(document))

    with pytest.raises(DataError, match=r"document 1 has 2 ids from 5 to 300: a document of uint8 .* from 0 to 255"):
        build([[1], [5, 300]])
    assert list(tmp_path.iterdir()) == []
    for dtype in ("float32", "uint32"):
        with pytest.raises(DataError, match=rf"{dtype} is no dtype of token ids in Megatron's files: use one of"):
            build([[1]], dtype)
    assert list(tmp_path.iterdir()) == []


def test_an_old_dataset_stays_until_the_new_one_is_complete(tmp_path, monkeypatch):
    sync = os.fsync

    def full(number):
        if f"{tmp_path}/a.bin-" in os.readlink(f"/proc/self/fd/{number}"):
            raise OSError("the disk is full")
        sync(number)

    def build():
        with indexed_builder(tmp_path / "a", dtype=np.dtype("uint8")) as builder:
            builder.add(np.array([3]))
            assert open_indexed(tmp_path / "a").tokens.tolist() == [1, 2]

    plain.write(tmp_path / "a", [[[1, 2]]])
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="the disk is full"):
            build()
    assert open_indexed(tmp_path / "a").tokens.tolist() == [1, 2]
    assert {each.name for each in tmp_path.iterdir()} == {"a.bin", "a.idx"}
    build()
    assert open_indexed(tmp_path / "a").tokens.tolist() == [3]


@pytest.fixture
def small(tmp_path):
    return plain.write(tmp_path / "a", [[[1, 2, 3]], [[4], [5, 6]], [], [[], [7]]])


def test_truncated_at_any_byte(small):
    count = 0
    for end in (".idx", ".bin"):
        file = small.with_name("a" + end)
        whole = file.read_bytes()
        for size in [*range(len(whole)), len(whole) + 1, len(whole) + 2]:
            file.write_bytes((whole + b"\0\0")[:size])
            with pytest.raises(DataError, match=rf"a\{end}"):
                open_indexed(small)
            count += 1
        file.write_bytes(whole)
    assert count == 34 + 5 * 12 + 5 * 8 + 2 + 14 + 2


def test_any_changed_byte_of_the_index_is_an_error_or_moves_a_boundary(small):
    """Of 8 × 134 flipped bits only some in the dtype and in the edges of documents leave files that agree."""
    index, agrees = small.with_name("a.idx"), []
    whole = index.read_bytes()
    for place in range(len(whole)):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << bit
            index.write_bytes(damaged)
            try:
                data = open_indexed(small)
            except DataError:
                continue
            agrees.append(place)
            assert sum(map(len, documents_of(data))) == 5
    edges = range(34 + 5 * 12, len(whole))
    assert {place for place in agrees if place not in edges} <= {17}
    assert len(agrees) < 12


@pytest.mark.parametrize("field", [0, 1])
@pytest.mark.parametrize("count", [2**31, 2**60, 2**64 - 1])
def test_counts_in_the_header_allocate_nothing(small, field, count):
    index = small.with_name("a.idx")
    whole = bytearray(index.read_bytes())
    struct.pack_into("<Q", whole, 18 + 8 * field, count)
    index.write_bytes(whole)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=r"a\.idx has 134 bytes, and an index of .* it is truncated or damaged"):
            open_indexed(small)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_lengths_that_only_agree_modulo_their_type_are_an_error(small):
    index = small.with_name("a.idx")
    whole = bytearray(index.read_bytes())
    struct.pack_into("<i", whole, 34 + 16, -3)  # the last sequence
    index.write_bytes(whole)
    with pytest.raises(DataError, match=r"sequence 4 has -3 tokens and begins at byte 12"):
        open_indexed(small)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_floats_are_no_tokens(tmp_path, dtype):
    plain.write(tmp_path / "a", [[[1, 2]]], dtype)
    with pytest.raises(DataError, match=rf"dtype code \d: {dtype}, which are no token ids\. fiddlex reads the codes"):
        open_indexed(tmp_path / "a")


def test_messages(small):
    with pytest.raises(DataError, match=r"there is no file .*a\.idx\.idx\. .* Give the prefix alone"):
        open_indexed(small.with_name("a.idx"))
    index = small.with_name("a.idx")
    whole = index.read_bytes()
    index.write_bytes(whole + bytes(5))
    with pytest.raises(DataError, match="has a mode for each sequence, as multimodal datasets have"):
        open_indexed(small)
    index.write_bytes(whole[:9] + struct.pack("<Q", 2) + whole[17:])
    with pytest.raises(DataError, match="has version 2, and fiddlex reads version 1"):
        open_indexed(small)
    index.write_bytes(whole[:17] + b"\x09" + whole[18:])
    with pytest.raises(DataError, match="has the dtype code 9: an unknown type"):
        open_indexed(small)


def test_the_digest_tells_of_every_boundary(tmp_path):
    layouts = [[[1, 2], [3]], [[1], [2, 3]], [[1, 2, 3], []], [[1, 2, 3]]]
    files = [plain.write(tmp_path / str(n), [[each] for each in layout]) for n, layout in enumerate(layouts)]
    files.append(plain.write(tmp_path / "one", [[[1, 2], [3]]]))
    assert len({open_indexed(file).digest for file in files}) == 5
