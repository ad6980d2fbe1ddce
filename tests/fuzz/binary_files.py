"""Readers of binary files: token files, their caches, and tensors."""

import itertools
import json
import pathlib
import struct
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from fiddlex.data import token_cache
from fiddlex.data.megatron.index_file import open_indexed
from fiddlex.data.megatron.order import document_order
from fiddlex.data.token_cache import MAGIC, cached_streams
from fiddlex.data.token_files import open_token_file
from fiddlex.data.token_stream import TokenStream
from fiddlex.interop.safetensors_files import INDEX, SINGLE, TensorFolder
from tests.data.megatron import plain
from tests.fuzz.reader import Reader

DOCUMENTS = [[[1, 2, 3]], [[4], [5, 6]], [], [[], [7]]]
TOKENS = np.arange(40, dtype="<u2")
VOCABULARY = 300
TENSORS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros((0, 4), np.int64), "c": np.ones(3, bool)}
BODY = bytes(range(64))  # the tensors of a header that is fuzzed alone
STREAMS = [TokenStream(TOKENS, num_bytes=80, num_documents=3, separator=0), TokenStream(TOKENS[:0], num_documents=0)]


def _written(dtype: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return plain.write(Path(folder) / "a", DOCUMENTS, dtype).with_name("a.idx").read_bytes()


def _index(folder: Path, data: bytes) -> None:
    plain.write(folder / "a", DOCUMENTS, "uint16")
    (folder / "a.idx").write_bytes(data)
    found = open_indexed(folder / "a")
    ends = [found.first_token(number) for number in range(len(found.lengths) + 1)]
    sequences = [found.tokens[first:last].tolist() for first, last in itertools.pairwise(ends)]
    edges = found.documents.tolist()
    assert [sequences[first:last] for first, last in itertools.pairwise(edges)] == plain.read(folder / "a")


def _ids(folder: Path, data: bytes) -> None:
    """PREFIX.bin beside the index of `DOCUMENTS`."""
    plain.write(folder / "a", DOCUMENTS, "uint16")
    (folder / "a.bin").write_bytes(data)
    assert open_indexed(folder / "a").tokens.tobytes() == data


def _token_file(folder: Path, data: bytes) -> None:
    (folder / "train.bin").write_bytes(data)
    tokens = open_token_file(folder / "train.bin", dtype="uint16", vocab_size=VOCABULARY)
    assert tokens.tobytes() == data
    assert tokens.max() < VOCABULARY


def _tensors(folder: Path, data: bytes) -> None:
    (folder / SINGLE).write_bytes(data)
    found = TensorFolder(folder)
    arrays = {name: found[name] for name in found.places}
    try:
        theirs = safetensors.numpy.load(data)
    except (safetensors.SafetensorError, TypeError, KeyError):  # it refuses more, such as headers padded with nothing
        return
    assert arrays.keys() == theirs.keys()
    for name, array in arrays.items():
        assert (array.shape, array.tobytes()) == (theirs[name].shape, theirs[name].tobytes())


def _header(folder: Path, data: bytes) -> None:
    _tensors(folder, struct.pack("<Q", len(data)) + data + BODY)


def _headers() -> list[bytes]:
    places = {"a": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]}}
    places["b"] = {"dtype": "U8", "shape": [32], "data_offsets": [32, 64]}
    return [json.dumps({"__metadata__": {"format": "pt"}} | places).encode()]


def _tensor_index(folder: Path, data: bytes) -> None:
    safetensors.numpy.save_file(TENSORS, folder / "model-1.safetensors")
    (folder / INDEX).write_bytes(data)
    found = TensorFolder(folder)
    files = json.loads(data)["weight_map"]
    assert found.places.keys() == files.keys() <= TENSORS.keys()
    assert all(place.file == folder / "model-1.safetensors" for place in found.places.values())
    assert all(found[name].tobytes() == TENSORS[name].tobytes() for name in found.places)


def _cache_file(folder: Path) -> Path:
    """The file that `_cached` reads, which is made there."""
    cached_streams(folder, "text:x", made_from=dict, read=lambda progress: STREAMS)
    (file,) = folder.glob("*.tokens")
    return file


def _cached(folder: Path) -> list[TokenStream]:
    return cached_streams(folder, "text:x", made_from=dict, read=lambda progress: STREAMS)


def _whole_cache() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return _cache_file(Path(folder)).read_bytes()


_CACHE = _whole_cache()
_CACHE_NAME = f"{json.loads(_CACHE[80 : -struct.calcsize('<QI8s')])['digest']}.tokens"


def _token_cache(folder: Path, data: bytes) -> None:
    """A damaged cache is made again, so that the tokens are right whatever the file has."""
    (folder / _CACHE_NAME).write_bytes(data)
    for found, made in zip(_cached(folder), STREAMS, strict=True):
        assert found.tokens.tobytes() == made.tokens.tobytes()
        assert (found.num_bytes, found.num_documents) == (made.num_bytes, made.num_documents)


def _cache_description(folder: Path, data: bytes) -> None:
    """A description with a checksum that is right, as somebody may write it who wants to do harm."""
    end = struct.pack("<QI8s", len(data), zlib.crc32(data), MAGIC)
    (folder / _CACHE_NAME).write_bytes(TOKENS.tobytes() + data + end)
    for stream in _cached(folder):
        assert stream.tokens.dtype.str in token_cache.DTYPES
        assert len(stream.tokens.tobytes()) <= TOKENS.nbytes
        assert stream.tokens.tobytes() in TOKENS.tobytes()


def _cache_descriptions() -> list[bytes]:
    return [_CACHE[TOKENS.nbytes : -struct.calcsize("<QI8s")]]


def _order(folder: Path, data: bytes) -> None:
    """A damaged order is made again."""
    index = open_indexed(plain.write(folder / "a", [[[1, 2]], [[3]], [[4, 5, 6]], [[7]]]))
    made = document_order(index, 0, 4, seed=3)
    (file,) = (folder / "a-cache").glob("*.npy")
    file.write_bytes(data)
    found = document_order(index, 0, 4, seed=3)
    if zlib.crc32(np.lib.format.open_memmap(file)[:-1].data):
        assert found.order.tolist() == made.order.tolist()
        assert found.places.tolist() == made.places.tolist()


def _orders() -> list[bytes]:
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        index = open_indexed(plain.write(folder / "a", [[[1, 2]], [[3]], [[4, 5, 6]], [[7]]]))
        document_order(index, 0, 4, seed=3)
        (file,) = (folder / "a-cache").glob("*.npy")
        return [file.read_bytes()]


def _as_json(value: Any) -> list[bytes]:
    return [json.dumps(value).encode()]


READERS = (
    Reader("megatron_idx", lambda: [_written("uint16")], _index),
    Reader("megatron_bin", lambda: [np.arange(1, 8, dtype="<u2").tobytes()], _ids),
    Reader("token_file", lambda: [TOKENS.tobytes(), TOKENS[:1].tobytes()], _token_file, may_be_cut=True),
    Reader("token_cache", lambda: [_CACHE], _token_cache, may_be_cut=True),
    Reader("token_cache_description", _cache_descriptions, _cache_description, is_json=True, may_be_cut=True),
    Reader("document_order", _orders, _order, may_be_cut=True),
    Reader("safetensors", lambda: [safetensors.numpy.save(TENSORS)], _tensors),
    Reader("safetensors_header", _headers, _header, is_json=True),
    Reader(
        "safetensors_index",
        lambda: _as_json({"metadata": {"total_size": 27}, "weight_map": dict.fromkeys(TENSORS, "model-1.safetensors")}),
        _tensor_index,
        is_json=True,
    ),
)
