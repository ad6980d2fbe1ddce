"""Encodes one piece of the input to a part of the dataset; runs in the processes of `prepare`.

Invariant: a part is complete when its `.json` exists; its bytes depend on the piece and the options alone.
"""

import dataclasses
import functools
import json
import multiprocessing
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np

from fiddlex.data.megatron.builder import IndexedBuilder, indexed_builder, smallest_dtype
from fiddlex.data.preparation.inputs import Piece, read_piece
from fiddlex.data.tokenizers import Tokenizer, make_tokenizer
from fiddlex.errors import DataError
from fiddlex.files.small_files import read_object
from fiddlex.files.whole_files import replacing

_ENCODED_AT_ONCE = 2**20  # characters


@dataclasses.dataclass(frozen=True)
class Encoding:
    """How texts become documents."""

    tokenizer: str  # 'bytes', or path of a JSON file of the tokenizers library
    json_key: str  # key or column of the text
    append_eod: bool  # whether to end each document with the tokenizer's separator


@dataclasses.dataclass
class Counts:
    """What a part has, or all parts together."""

    documents: int = 0
    tokens: int = 0  # written, separators included
    unknown: int = 0  # those of `tokens` that stand for text that the tokenizer does not know
    empty: int = 0  # texts that gave no token and were left out
    passed_over: int = 0  # files that are binary or not UTF-8 and were left out
    text_bytes: int = 0  # UTF-8 bytes of the texts

    @classmethod
    def of(cls, values: Any) -> "Counts":
        """The counts that a file has; raises ValueError when these are none."""
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(values, dict) or not values.keys() <= names:
            raise ValueError("these are no counts")
        if not all(type(value) is int and 0 <= value < 2**63 for value in values.values()):
            raise ValueError("a count is no whole number from 0 on")
        return cls(**values)

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))


def part_path(folder: Path, number: int) -> Path:
    """The path of part `number` without .bin, .idx and .json."""
    return folder / f"part-{number:06d}"


def start_worker() -> None:
    """Prepares a process: one thread for tokenizers, and an end when the parent has ended, however it did."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def encode_part(piece: Piece, folder: Path, number: int, encoding: Encoding) -> Counts:
    file = encoding.tokenizer
    tokenizer = _tokenizer(file, 0 if file == "bytes" else os.stat(os.path.expanduser(file)).st_mtime_ns)
    counts, texts, waiting = Counts(), list[str](), 0
    path = part_path(folder, number)
    with indexed_builder(path, dtype=smallest_dtype(tokenizer.vocab_size)) as builder:
        for text in read_piece(piece, encoding.json_key):
            if text is None:
                counts.passed_over += 1
                continue
            texts.append(text)
            waiting += len(text)
            if waiting >= _ENCODED_AT_ONCE:
                _write(builder, texts, tokenizer, encoding, counts)
                texts, waiting = [], 0
        _write(builder, texts, tokenizer, encoding, counts)
    # A worker may live on for a moment after its parent was killed, while the same command encodes the piece again.
    with replacing(path.with_name(path.name + ".json"), shared=True) as opened:
        opened.write(json.dumps(dataclasses.asdict(counts)).encode())
    return counts


@functools.lru_cache(maxsize=1)
def _tokenizer(spec: str, mtime_ns: int) -> Tokenizer:
    """The tokenizer of this process; reading a large one again for each piece would take longer than encoding."""
    return make_tokenizer(spec)


def read_counts(folder: Path, number: int) -> Counts | None:
    """What part `number` has; None when the part is not complete."""
    try:
        path = part_path(folder, number)
        return Counts.of(read_object(path.with_name(path.name + ".json")))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise DataError(f"{folder} is damaged: part {number} has no readable counts. Remove {folder}.") from error


def _write(builder: IndexedBuilder, texts: list[str], tokenizer: Tokenizer, encoding: Encoding, counts: Counts) -> None:
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        if not len(ids):
            counts.empty += 1
            continue
        document = np.append(ids, np.int32(tokenizer.separator or 0)) if encoding.append_eod else ids
        builder.add(document)
        counts.documents += 1
        counts.tokens += len(document)
        counts.unknown += 0 if tokenizer.unknown is None else int(np.count_nonzero(ids == tokenizer.unknown))
        counts.text_bytes += len(text) if text.isascii() else len(text.encode("utf-8"))
