"""Flat token files: little-endian uint16 or uint32 ids and nothing else, as nanoGPT's `train.bin`.

Invariant: a file is memory-mapped and never read whole; what a caller gets is a read-only view of it.
"""

from pathlib import Path

import numpy as np

from fiddlex.errors import DataError

# Ids checked at opening: half a gigabyte of uint16, a second or so. The loader checks each batch, so that later ids
# are caught as well, only later.
SCANNED_TOKENS = 256 * 2**20
_CHUNK_TOKENS = 2**22


def open_token_file(path: Path, *, dtype: str, vocab_size: int) -> np.memmap:
    """Maps the token file `path`.

    Args:
      path: of the file.
      dtype: 'uint16' or 'uint32', `data.token_dtype`.
      vocab_size: ids must be below it; the first `SCANNED_TOKENS` are checked here.

    Returns:
      uint16[tokens] or uint32[tokens].

    Raises:
      DataError: when the file is missing, empty, cut short, or has ids outside the vocabulary.
      OSError: when it cannot be read.
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
    _check_vocab(tokens, path, dtype=dtype, vocab_size=vocab_size)
    return tokens


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
