"""Tokens that are collected piece by piece, in memory as long as they are few and in a temporary file beyond that."""

import tempfile
from typing import BinaryIO

import numpy as np

from fiddlex.errors import DataError

_MEMORY_TOKENS = 2**26  # tokens that wait in memory


class TokenBuffer:
    """Joins pieces of token ids into one array of `dtype`, which is unsigned."""

    def __init__(self, dtype: np.dtype):
        self._dtype = dtype
        self._pieces: list[np.ndarray] = []
        self._num_waiting = 0
        self._file: BinaryIO | None = None

    def append(self, ids: np.ndarray) -> None:
        """Adds a piece, integers [tokens]."""
        self._pieces.append(ids.astype(self._dtype))
        self._num_waiting += len(ids)
        if self._num_waiting > _MEMORY_TOKENS:
            self._write()

    def joined(self) -> np.ndarray:
        """All pieces, [tokens]; a memory map if they are in a file, which the system removes after its last use."""
        if self._file is None:
            return np.concatenate([np.zeros(0, self._dtype), *self._pieces])
        self._write()
        with self._file as file:
            return np.memmap(file, self._dtype, mode="r")

    def _write(self) -> None:
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="fiddlex-tokens-")  # noqa: SIM115  # `joined` closes it
            for piece in self._pieces:
                self._file.write(piece.tobytes())
            self._file.flush()
        except OSError as error:
            raise DataError(
                f"Cannot write tokens to a temporary file in {tempfile.gettempdir()}: {error.strerror or error}. Make "
                "room there, or name another folder in the environment variable TMPDIR."
            ) from error
        self._pieces, self._num_waiting = [], 0
