"""Writes Megatron-LM's indexed datasets, which Megatron reads too; `index_file` has the format.

Invariant: PREFIX.bin and PREFIX.idx appear under their names only when both are complete and on disk. Until then the
bytes are in files with other names, beside them.
"""

import array
import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from fiddlex.data.megatron.index_file import DTYPES, HEADER, MAGIC, VERSION, open_indexed
from fiddlex.errors import DataError
from fiddlex.files.whole_files import replacing

_CODES = {dtype: code for code, dtype in DTYPES.items()}
LONGEST = 2**31 - 1  # tokens of a sequence, whose length is an int32


def smallest_dtype(vocab_size: int) -> np.dtype:
    """The smallest of the format's dtypes that holds the ids below `vocab_size`: uint8, uint16 or int32."""
    return np.dtype("u1") if vocab_size <= 2**8 else np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<i4")


@contextlib.contextmanager
def indexed_builder(prefix: Path, *, dtype: np.dtype) -> Iterator["IndexedBuilder"]:
    """Yields what documents are added to, and makes PREFIX.bin and PREFIX.idx when the body ends without an error.

    Files of these names are replaced. Several processes may make the same files at the same time; those of the last one
    stay. `dtype` is one of `DTYPES`, of integers.
    """
    dtype = np.dtype(dtype).newbyteorder("<")
    if dtype.kind == "f" or dtype not in _CODES:
        names = ", ".join(each.name for each in _CODES if each.kind != "f")
        raise DataError(f"{dtype.name} is no dtype of token ids in Megatron's files: use one of {names}.")
    data_file, index_file = (prefix.with_name(prefix.name + end) for end in (".bin", ".idx"))
    with (
        replacing(index_file, shared=True, synced=True) as index,
        replacing(data_file, shared=True, synced=True) as data,
    ):
        builder = IndexedBuilder(data, dtype=dtype)
        yield builder
        builder.write_index(index)


class IndexedBuilder:
    """The documents of a dataset that `indexed_builder` makes; `dtype` is little-endian."""

    def __init__(self, data: BinaryIO, *, dtype: np.dtype):
        self._data, self._dtype = data, dtype
        self._lengths, self._documents = array.array("i"), array.array("q", [0])

    @property
    def num_documents(self) -> int:
        return len(self._documents) - 1

    def add(self, ids: np.ndarray) -> None:
        """Writes a document of one sequence, integers [tokens]; raises DataError when the format cannot hold it."""
        written = np.asarray(ids, self._dtype)
        if len(ids) > LONGEST or not np.array_equal(written, ids):
            limits = np.iinfo(self._dtype)
            raise DataError(
                f"document {self.num_documents} has {len(ids):,} ids from {np.min(ids)} to {np.max(ids)}: a document "
                f"of {self._dtype.name} has up to {LONGEST:,} ids from {limits.min} to {limits.max}. Use a wider "
                "dtype, or shorter documents."
            )
        self._data.write(written.tobytes())
        self._lengths.append(len(ids))
        self._documents.append(len(self._lengths))

    def add_dataset(self, prefix: Path) -> None:
        """Writes all sequences and documents of another dataset of the same dtype."""
        other = open_indexed(prefix)
        if other.tokens.dtype != self._dtype:
            raise DataError(f"megatron:{prefix} has ids of {other.tokens.dtype.name}, not {self._dtype.name}.")
        self._documents.frombytes((other.documents[1:] + len(self._lengths)).astype(np.int64).tobytes())
        self._lengths.frombytes(other.lengths.astype(np.int32).tobytes())
        with prefix.with_name(prefix.name + ".bin").open("rb") as data:
            shutil.copyfileobj(data, self._data, 2**22)

    def write_index(self, index: BinaryIO) -> None:
        lengths = np.frombuffer(self._lengths, np.int32)
        stops = np.cumsum(lengths, dtype=np.int64) * self._dtype.itemsize
        index.write(HEADER.pack(MAGIC, VERSION, _CODES[self._dtype], len(lengths), len(self._documents)))
        index.write(lengths.astype("<i4").tobytes())
        index.write((stops - lengths.astype(np.int64) * self._dtype.itemsize).astype("<i8").tobytes())
        index.write(np.frombuffer(self._documents, np.int64).astype("<i8").tobytes())
