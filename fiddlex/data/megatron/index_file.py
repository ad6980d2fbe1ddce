"""Reads Megatron-LM's indexed datasets: PREFIX.bin holds token ids, and PREFIX.idx where each sequence begins.

All numbers are little-endian. PREFIX.idx is, without gaps:

    9 bytes                the letters MMIDIDX and two zero bytes
    uint64                 version, 1
    uint8                  code of the ids' dtype (`DTYPES`)
    uint64                 number of sequences, n
    uint64                 number of documents + 1, d
    int32[n]               tokens of each sequence
    int64[n]               byte of PREFIX.bin at which each sequence begins
    int64[d]               first sequence of each document, and n at the end

This is what `IndexedDatasetBuilder` of megatron.core.datasets.indexed_dataset writes (version 0.16). It puts the
sequences side by side in PREFIX.bin, so the second array follows from the first. Multimodal datasets have int8[n] more.

Invariant: an `IndexedTokens` has been checked: its numbers agree with each other and with the sizes of both files. Both
files are memory-mapped; nothing is allocated that a number in a file decides before the number has been checked against
the file's size.
"""

import dataclasses
import functools
import hashlib
import struct
from pathlib import Path
from typing import Any

import numpy as np

from fiddlex.errors import DataError

MAGIC = b"MMIDIDX\0\0"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype[Any]] = {
    code: np.dtype(name).newbyteorder("<")
    for code, name in enumerate(("u1", "i1", "i2", "i4", "i8", "f8", "f4", "u2"), start=1)
}
_CHUNK = 2**22  # entries of the index that are checked at once
_MOST_BYTES = 2**61  # of PREFIX.bin, so that no sum of one chunk more overflows


@dataclasses.dataclass(frozen=True, eq=False)
class IndexedTokens:
    """The tokens of a dataset, with its sequences and documents. All arrays are read-only memory maps."""

    prefix: Path  # the path of the files without .bin and .idx
    tokens: np.ndarray  # integers, [tokens], of the dtype of the file
    lengths: np.ndarray  # int32[sequences], tokens of each sequence
    documents: np.ndarray  # int64[documents + 1], the first sequence of each document, and the number of sequences
    _pointers: np.ndarray

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the lengths and documents, in hexadecimal: it changes whenever a boundary does."""
        digest = hashlib.sha256()
        for array in (self.lengths, self.documents):
            for start in range(0, len(array), _CHUNK):
                digest.update(array[start : start + _CHUNK].tobytes())
        return digest.hexdigest()

    def starts(self, sequences: np.ndarray | slice) -> np.ndarray:
        """The first token of each of `sequences`, int64; a sequence may be empty."""
        return np.asarray(self._pointers[sequences] // self.tokens.dtype.itemsize, np.int64)

    def first_token(self, sequence: int) -> int:
        """The first token of `sequence`; the number of tokens, if `sequence` is the number of sequences."""
        return int(self.starts(slice(sequence, sequence + 1))[0]) if sequence < len(self.lengths) else len(self.tokens)

    def bounds(self, first: int, last: int) -> np.ndarray:
        """The documents from `first` to before `last` that have tokens.

        Returns:
          int64[documents, 2]: the first token of each document and the one after its last.
        """
        sequences = np.asarray(self.documents[first : last + 1], np.int64)
        if last <= first:
            return np.zeros((0, 2), np.int64)
        edges = np.full(len(sequences), len(self.tokens), np.int64)
        inside = sequences < len(self.lengths)
        edges[inside] = self.starts(sequences[inside])
        bounds = np.stack([edges[:-1], edges[1:]], axis=1)
        return bounds[bounds[:, 0] < bounds[:, 1]]


def open_indexed(prefix: Path) -> IndexedTokens:
    """Maps PREFIX.bin and PREFIX.idx into memory and checks them.

    The whole index is read, 12 bytes for each sequence and 8 for each document; of the tokens nothing is read.
    """
    if not prefix.name:
        raise DataError(f"megatron:{prefix} is no prefix of files. A dataset of Megatron is PREFIX.bin and PREFIX.idx.")
    index, data = (prefix.with_name(prefix.name + end) for end in (".idx", ".bin"))
    for file in (index, data):
        if not file.is_file():
            hint = " Give the prefix alone." if prefix.suffix in (".bin", ".idx") else ""
            raise DataError(
                f"megatron:{prefix}: there is no file {file}. A dataset of Megatron is PREFIX.bin and PREFIX.idx, as "
                f"fiddlex prepare_data and Megatron's preprocess_data.py write them.{hint}"
            )
    dtype, num_sequences, num_edges = _header(index)
    lengths_at, bytes_per_id = HEADER.size, dtype.itemsize
    mapped = np.memmap(index, np.uint8, mode="r")
    pointers_at = lengths_at + 4 * num_sequences
    documents_at = pointers_at + 8 * num_sequences
    lengths = mapped[lengths_at:pointers_at].view("<i4")
    pointers = mapped[pointers_at:documents_at].view("<i8")
    documents = mapped[documents_at : documents_at + 8 * num_edges].view("<i8")
    num_tokens = _check_sequences(index, lengths, pointers, bytes_per_id)
    _check_documents(index, documents, num_sequences)
    size = data.stat().st_size
    if size != num_tokens * bytes_per_id:
        raise DataError(
            f"{data} has {size:,} bytes, and {index} tells of {num_tokens:,} tokens of {bytes_per_id} bytes, "
            f"{num_tokens * bytes_per_id:,}: the file is truncated, or the two are of different datasets. Copy both "
            "again."
        )
    tokens = np.memmap(data, dtype, mode="r") if size else np.zeros(0, dtype)
    return IndexedTokens(prefix, tokens, lengths, documents, pointers)


def _header(file: Path) -> tuple[np.dtype[Any], int, int]:
    """The dtype of the ids, the number of sequences, and that of documents + 1, as far as the file's size allows."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        raise DataError(f"{file} has {size} bytes, fewer than the {HEADER.size} of its header. Copy it again.")
    magic, version, code, num_sequences, num_edges = HEADER.unpack(header)
    if magic != MAGIC:
        raise DataError(
            f"{file} does not begin with {MAGIC!r}: it is no index of Megatron's, or is damaged. Copy it again, or "
            "make it with fiddlex prepare_data."
        )
    if version != VERSION:
        raise DataError(f"{file} has version {version}, and fiddlex reads version {VERSION}. Copy or make it again.")
    if code not in DTYPES or DTYPES[code].kind == "f":
        kind = f"{DTYPES[code].name}, which are no token ids" if code in DTYPES else "an unknown type"
        known = ", ".join(f"{each} ({dtype.name})" for each, dtype in DTYPES.items() if dtype.kind != "f")
        raise DataError(f"{file} has the dtype code {code}: {kind}. fiddlex reads the codes {known}.")
    expected = HEADER.size + 12 * num_sequences + 8 * num_edges
    if num_sequences and size == expected + num_sequences:
        raise DataError(
            f"{file} has a mode for each sequence, as multimodal datasets have: fiddlex trains on text. Make the files "
            "again from the text alone."
        )
    if size != expected:
        raise DataError(
            f"{file} has {size:,} bytes, and an index of {num_sequences:,} sequences and {num_edges:,} edges of "
            f"documents has {expected:,}: it is truncated or damaged. Copy it again."
        )
    return DTYPES[code], num_sequences, num_edges


def _check_sequences(file: Path, lengths: np.ndarray, pointers: np.ndarray, bytes_per_id: int) -> int:
    """The number of tokens; raises DataError unless the sequences lie side by side from byte 0 on."""
    end = 0
    for first in range(0, len(lengths), _CHUNK):
        chunk = np.asarray(lengths[first : first + _CHUNK], np.int64)
        stops = end + bytes_per_id * np.cumsum(chunk)
        starts = stops - bytes_per_id * chunk
        wrong = (chunk < 0) | (starts != pointers[first : first + _CHUNK]) | (stops > _MOST_BYTES)
        if wrong.any():
            place = int(np.argmax(wrong))
            raise DataError(
                f"{file}: sequence {first + place} has {chunk[place]} tokens and begins at byte "
                f"{pointers[first + place]} of the .bin file, and the sequences before it end at byte {starts[place]}: "
                "the file is damaged. Copy it again."
            )
        end = int(stops[-1])
    return end // bytes_per_id


def _check_documents(file: Path, documents: np.ndarray, num_sequences: int) -> None:
    """Raises DataError unless the edges of documents rise from 0 to the number of sequences."""
    first, last = (int(documents[0]), int(documents[-1])) if len(documents) else (0, -1)
    falls = any(
        (np.diff(documents[start : start + _CHUNK + 1]) < 0).any() for start in range(0, len(documents), _CHUNK)
    )
    if first != 0 or last != num_sequences or falls:
        raise DataError(
            f"{file}: its {len(documents):,} edges of documents do not rise from 0 to the {num_sequences:,} sequences: "
            "the file is damaged, or its writer did not end its last document. Copy it again."
        )
