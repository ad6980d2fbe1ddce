"""The order of the documents that are packed into examples, and the place of each one's first token.

The order is that of Megatron's GPTDataset for one epoch: numpy's RandomState(seed) shuffles the documents. Order and
places are computed once and cached, in the folder PREFIX-cache beside the data, or where that cannot be written in
$XDG_CACHE_HOME/fiddlex (by default ~/.cache/fiddlex). With millions of documents that saves seconds at each start.

Invariant: a cached file is one that was made of the same lengths, documents and seed: its name is a hash of them, its
last entry a checksum of the others. It appears under its name only when it is complete; a damaged one is made again.
"""

import contextlib
import hashlib
import logging
import os
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fiddlex.data.megatron.index_file import IndexedTokens

logger = logging.getLogger(__name__)

_FORMAT = 1  # of the cached files


class DocumentOrder(NamedTuple):
    """Shuffled documents.

    Attributes:
      order: int64[documents], the documents; each is a sequence of the index.
      places: int64[documents + 1], the tokens before each document of `order`, and all tokens at the end.
    """

    order: np.ndarray
    places: np.ndarray


def document_order(data: IndexedTokens, first: int, last: int, *, seed: int) -> DocumentOrder:
    """The shuffled documents from `first` to before `last`, from the cache if it has them."""
    count = last - first
    text = f"{_FORMAT} {data.digest} {first} {last} {seed}"
    name = f"order-{hashlib.sha256(text.encode()).hexdigest()[:24]}.npy"
    folders = list(_folders(data.prefix))
    for folder in folders:
        if (found := _read(folder / name, count)) is not None:
            return found
    made = _shuffled(data, first, last, seed)
    for folder in folders:
        with contextlib.suppress(OSError):  # the next folder, or none: then the order is made again at the next start
            _write(folder / name, made)
            break
    return made


def _shuffled(data: IndexedTokens, first: int, last: int, seed: int) -> DocumentOrder:
    order = np.arange(first, last, dtype=np.int64)
    np.random.RandomState(seed).shuffle(order)
    places = np.zeros(len(order) + 1, np.int64)
    np.cumsum(data.lengths[first:last][order - first], out=places[1:])
    return DocumentOrder(order, places)


def _folders(prefix: Path) -> Iterator[Path]:
    yield prefix.with_name(prefix.name + "-cache")
    with contextlib.suppress(RuntimeError):  # nobody's home
        yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fiddlex"


def _read(file: Path, count: int) -> DocumentOrder | None:
    """The order of `count` documents in `file`, mapped into memory; None when there is none, or it is damaged."""
    try:
        numbers = np.lib.format.open_memmap(file, mode="r")
    except FileNotFoundError:
        return None
    except Exception as error:  # numpy lets through whatever the parser of a header raises
        logger.warning("%s is damaged and is made again: %s", file, error)
        return None
    whole = numbers.dtype == np.int64 and numbers.shape == (2 * count + 2,)
    if not whole or _checksum(numbers) != numbers[-1]:
        logger.warning("%s is damaged and is made again: its checksum is another.", file)
        return None
    return DocumentOrder(numbers[count + 1 : -1], numbers[: count + 1])


def _checksum(numbers: np.ndarray) -> int:
    return zlib.crc32(numbers[:-1].data)


def _write(file: Path, made: DocumentOrder) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    numbers = np.concatenate([made.places, made.order, [0]])
    numbers[-1] = _checksum(numbers)
    with tempfile.NamedTemporaryFile(dir=file.parent, suffix=".tmp", delete=False) as temporary:
        try:
            np.save(temporary, numbers, allow_pickle=False)
            temporary.close()
            os.replace(temporary.name, file)
        except BaseException:
            os.unlink(temporary.name)
            raise
