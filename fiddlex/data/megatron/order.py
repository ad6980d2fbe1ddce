"""The order of the documents that are packed into examples, and the place of each one's first token.

The order is that of Megatron's GPTDataset for one epoch: numpy's RandomState(seed) shuffles the documents. Order and
places are computed once and cached, in the folder PREFIX-cache beside the data, or where that cannot be written in
$XDG_CACHE_HOME/fiddlex (by default ~/.cache/fiddlex). With millions of documents that saves seconds at each start.
Of several processes the first one writes the file; the others wait for it, and one that does not see it computes the
order for itself.

Invariant: a cached file is one that was made of the same lengths, documents and seed: its name is a hash of them, its
last entry a checksum of the others. It appears under its name only when it is complete; a damaged one is made again.
"""

import contextlib
import hashlib
import logging
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fiddlex.cluster import processes
from fiddlex.data.megatron.index_file import IndexedTokens
from fiddlex.files.places import cache_folder
from fiddlex.files.small_files import check_regular
from fiddlex.files.whole_files import remove_leftovers, replacing

logger = logging.getLogger(__name__)

_FORMAT = 1  # of the cached files


class DocumentOrder(NamedTuple):
    """Shuffled documents."""

    order: np.ndarray  # int64[documents], the documents; each is a sequence of the index
    places: np.ndarray  # int64[documents + 1], the tokens before each document of `order`, and all tokens at the end


def document_order(data: IndexedTokens, first: int, last: int, *, seed: int) -> DocumentOrder:
    """The shuffled documents from `first` to before `last`, from the cache if it has them."""
    num_tokens = data.first_token(last) - data.first_token(first)
    text = f"{_FORMAT} {data.digest} {first} {last} {seed}"
    name = f"order-{hashlib.sha256(text.encode()).hexdigest()[:24]}.npy"
    files = [folder / name for folder in _folders(data.prefix)]

    def found_or_made() -> DocumentOrder:
        for file in files:
            if (found := _read(file, first, last, num_tokens)) is not None:
                return found
        made = _shuffled(data, first, last, seed)
        if processes.is_first():
            for file in files:
                with contextlib.suppress(OSError):  # the next folder, or none: then each start makes the order again
                    _write(file, made)
                    break
        return made

    order = found_or_made() if processes.is_first() else None
    processes.barrier(f"order of the documents of {data.prefix}")
    return found_or_made() if order is None else order


def _shuffled(data: IndexedTokens, first: int, last: int, seed: int) -> DocumentOrder:
    order = np.arange(first, last, dtype=np.int64)
    np.random.RandomState(seed).shuffle(order)
    places = np.zeros(len(order) + 1, np.int64)
    np.cumsum(data.lengths[first:last][order - first], out=places[1:])
    return DocumentOrder(order, places)


def _folders(prefix: Path) -> Iterator[Path]:
    yield prefix.with_name(prefix.name + "-cache")
    with contextlib.suppress(FileNotFoundError):  # the user has no home
        yield cache_folder()


def _read(file: Path, first: int, last: int, num_tokens: int) -> DocumentOrder | None:
    """The order in `file`, mapped into memory; None when it is missing, damaged, or of other documents or tokens."""
    try:
        check_regular(file)
        numbers = np.lib.format.open_memmap(file, mode="r")
    except FileNotFoundError:
        return None
    except Exception as error:  # numpy lets through whatever the parser of a header raises
        logger.warning("%s is damaged and is made again: %s", file, error)
        return None
    count = last - first
    whole = numbers.dtype == np.int64 and numbers.shape == (2 * count + 2,)
    if not whole or _checksum(numbers) != numbers[-1]:
        logger.warning("%s is damaged and is made again: its checksum is another.", file)
        return None
    found = DocumentOrder(numbers[count + 1 : -1], numbers[: count + 1])
    inside = (found.order >= first) & (found.order < last)
    if found.places[0] != 0 or found.places[-1] != num_tokens or not inside.all() or (np.diff(found.places) < 0).any():
        logger.warning("%s is of other data and is made again.", file)
        return None
    return found


def _checksum(numbers: np.ndarray) -> int:
    return zlib.crc32(numbers[:-1].data)


def _write(file: Path, made: DocumentOrder) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    numbers = np.concatenate([made.places, made.order, [0]])
    numbers[-1] = _checksum(numbers)
    remove_leftovers(file)
    with replacing(file, shared=True) as opened:
        np.save(opened, numbers, allow_pickle=False)
