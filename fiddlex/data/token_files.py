"""Flat token files: little-endian uint16 or uint32 ids and nothing else, as nanoGPT's `train.bin`.

Such a file does not record its dtype, but its ids reveal it. When uint16 ids are read as uint32, they exceed the
vocabulary. When uint32 ids are read as uint16, every second value is the upper half of an id, which is close to 0.

Invariant: a file is memory-mapped and never read whole; callers get a read-only view of it.
"""

from pathlib import Path

import numpy as np

from fiddlex.errors import DataError

# Ids checked at opening: half a gigabyte of uint16, which takes about a second. The loader checks each batch, so it
# finds bad ids beyond these.
SCANNED_TOKENS = 256 * 2**20
_CHUNK_TOKENS = 2**22

# The tokens read to distinguish uint32 from uint16 ids: pieces from the whole file, half a megabyte in all.
_PIECES, _PIECE_TOKENS = 64, 2**12
_LARGER_IDS = 40  # all in lower halves; uint16 ids fall in either half, so only one file in 2⁴⁰ has this by chance


def open_token_file(path: Path, *, dtype: str, vocab_size: int) -> np.memmap:
    """Maps the token file `path` into memory: uint16[tokens] or uint32[tokens], by `dtype` ('uint16' or 'uint32').

    Raises:
      DataError: when the file is missing, empty, cut short or of the other dtype, or one of its first `SCANNED_TOKENS`
        ids is not below `vocab_size`.
    """
    if not path.is_file():
        raise DataError(
            f"tokens:{path}: there is no such file. Give a token file or a folder with train.bin, such as a prepare.py "
            "of nanoGPT's data folders writes."
        )
    item = np.dtype(dtype).newbyteorder("<")
    size = path.stat().st_size
    if size == 0:
        raise DataError(f"tokens:{path} is empty (0 bytes). Write the tokens again.")
    if size % item.itemsize:
        raise DataError(
            f"tokens:{path} has {size} bytes, which is not a multiple of {item.itemsize}, the size of a {dtype}: the "
            "file is truncated or of another dtype. Copy it again, or set data.token_dtype."
        )
    tokens = np.memmap(path, dtype=item, mode="r")
    if dtype == "uint16" and size % 4 == 0:
        _check_halves(tokens, path, vocab_size=vocab_size)
    _check_vocab(tokens, path, dtype=dtype, vocab_size=vocab_size)
    return tokens


def _check_halves(tokens: np.memmap, path: Path, *, vocab_size: int) -> None:
    """Raises DataError when the tokens appear to be the lower and upper halves of uint32 ids."""
    largest = (vocab_size - 1) >> 16  # upper half of an id in the vocabulary
    spacing = max(_PIECE_TOKENS, -(-len(tokens) // (2 * _PIECES)) * 2)  # even: every piece begins with a lower half
    pieces = [tokens[start : start + _PIECE_TOKENS] for start in range(0, len(tokens), spacing)]
    lower, upper = (np.concatenate([piece[side::2] for piece in pieces]) for side in (0, 1))
    if upper.max() <= largest and np.count_nonzero(lower > largest) >= _LARGER_IDS:
        raise DataError(
            f"tokens:{path} was made of uint32 ids, and data.token_dtype=uint16 cuts each in two: of "
            f"{len(lower):,} pairs of tokens from the whole file the second is never above {largest}, the first up to "
            f"{lower.max():,}. Set data.token_dtype=uint32. (If these are uint16 ids after all, append one to the "
            "file: an odd number of them cannot be taken for uint32.)"
        )


def _check_vocab(tokens: np.memmap, path: Path, *, dtype: str, vocab_size: int) -> None:
    if np.iinfo(tokens.dtype).max < vocab_size:
        return
    for start in range(0, min(len(tokens), SCANNED_TOKENS), _CHUNK_TOKENS):
        chunk = tokens[start : start + _CHUNK_TOKENS]
        if chunk.max() >= vocab_size:
            position = int(np.argmax(chunk >= vocab_size))
            raise DataError(
                f"tokens:{path}: token {start + position} is {chunk[position]}, outside the vocabulary of "
                f"model.vocab_size={vocab_size}. Either the file is not of data.token_dtype={dtype}, or it was made "
                "with a larger vocabulary: set data.token_dtype or model.vocab_size."
            )
