"""The cache of fetched samples in a file, for all runs of a machine that train on the same samples.

The file only grows, up to its bound, by one record for each sample:

    4 bytes      `MAGIC`
    int64        key
    8 bytes      dtype, as in '<u2'
    uint32       number of tokens
    uint32       CRC-32 of the tokens
    uint32       CRC-32 of the fields above, begun with that of the name of the data
    the tokens

Invariants: only the holder of the file's lock writes. A record counts when all of it is there; what a killed process
left of a record is cut off by the next one that writes. A sample is compared with its checksum whenever it is read; a
damaged one is fetched and written again. Whatever happens to the file, a sample from it is right or there is none.
"""

import contextlib
import errno
import functools
import logging
import os
import struct
import threading
import weakref
import zlib
from pathlib import Path

import numpy as np

from fiddlex.errors import DataError
from fiddlex.files.file_locks import locked

logger = logging.getLogger(__name__)

MAGIC = b"FXS1"
SUFFIX = ".samples"
_FIELDS = struct.Struct("<4sq8sII")
_CHECKSUM = struct.Struct("<I")
_HEADER_BYTES = _FIELDS.size + _CHECKSUM.size
_DTYPES = frozenset({"|u1", "|i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8"})


class DiskCache:
    """Samples in a file of up to `limit_bytes`, see the module. The first access opens the file.

    `folder` is on a disk of this machine and is made if need be. `name` identifies the data that the samples are cut
    from, and how they are cut.
    """

    def __init__(self, folder: Path, name: str, limit_bytes: float):
        self.path = folder / f"{name}{SUFFIX}"
        self._limit_bytes = limit_bytes
        self._seed = zlib.crc32(name.encode())
        self._places: dict[int, int] = {}
        self._end = 0  # of the records that this process has seen
        self._writes, self._warned = True, False
        self._lock = threading.Lock()

    def __len__(self) -> int:
        self.open()
        return len(self._places)

    def open(self) -> None:
        """Opens the file, or makes it, and finds its samples; raises DataError when it can do neither."""
        with self._lock:
            self._scan()

    def get(self, key: int) -> np.ndarray | None:
        """The sample; None when it is not in the file, or damaged."""
        if key not in self._places:
            with self._lock:
                self._scan()
        if (place := self._places.get(key)) is None:
            return None
        with contextlib.suppress(OSError, ValueError):
            return self._sample(key, place)
        if not self._warned:
            self._warned = True
            logger.warning("%s has damaged samples; they are fetched again.", self.path)
        return None

    def put(self, key: int, sample: np.ndarray) -> None:
        """Adds the sample if there is room, or mends its record. A file that cannot be written stays as it is."""
        sample = np.ascontiguousarray(sample, sample.dtype.newbyteorder("<"))
        size = _HEADER_BYTES + sample.nbytes
        is_full = key not in self._places and self._end + size > self._limit_bytes
        if is_full or not self._writes or sample.dtype.str not in _DTYPES:
            return
        try:
            with self._lock, locked(self._file):
                self._write(key, sample, size)
        except OSError as error:
            self._writes = False
            logger.warning("%s: no more samples are added: %s.", self.path, error.strerror or error)

    @functools.cached_property
    def _file(self) -> int:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                if error.errno not in (errno.EROFS, errno.EACCES) or not self.path.exists():
                    raise
                file, self._writes = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC), False
        except OSError as error:
            raise DataError(
                f"data.sample_cache_folder={self.path.parent}: cannot open {self.path.name}: "
                f"{error.strerror or error}. Name a folder in which this process may write, or leave the field empty "
                "to keep samples in memory."
            ) from error
        weakref.finalize(self, os.close, file)
        return file

    def _scan(self) -> None:
        """Finds the records that have been added since the last scan."""
        size = os.fstat(self._file).st_size
        while self._end + _HEADER_BYTES <= size:
            try:
                key, dtype, count, _ = self._header(self._end)
            except ValueError:
                return  # what a killed process left
            stop = self._end + _HEADER_BYTES + count * dtype.itemsize
            if stop > size:
                return
            self._places[key], self._end = self._end, stop

    def _header(self, place: int) -> tuple[int, np.dtype, int, int]:
        """Key, dtype, number of tokens and their checksum; raises ValueError where there is no whole header."""
        header = os.pread(self._file, _HEADER_BYTES, place)
        fields = header[: _FIELDS.size]
        if len(header) < _HEADER_BYTES or _CHECKSUM.unpack(header[_FIELDS.size :])[0] != self._checksum(fields):
            raise ValueError("no header")
        magic, key, dtype, count, checksum = _FIELDS.unpack(fields)
        text = dtype.rstrip(b"\0").decode("ascii", "replace")
        if magic != MAGIC or text not in _DTYPES:
            raise ValueError("no header")
        return key, np.dtype(text), count, checksum

    def _sample(self, key: int, place: int) -> np.ndarray:
        """The sample of a record; raises ValueError where there is not that record, undamaged."""
        found, dtype, count, checksum = self._header(place)
        tokens = os.pread(self._file, count * dtype.itemsize, place + _HEADER_BYTES)
        if found != key or len(tokens) < count * dtype.itemsize or zlib.crc32(tokens) != checksum:
            raise ValueError("damaged")
        return np.frombuffer(tokens, dtype)

    def _write(self, key: int, sample: np.ndarray, size: int) -> None:
        """Writes a record; the caller holds both locks."""
        self._scan()
        record = self._record(key, sample)
        if (place := self._places.get(key)) is not None:
            with contextlib.suppress(ValueError):
                if self._header(place)[:3] == (key, sample.dtype, sample.size):  # the same extent
                    os.pwrite(self._file, record, place)
            return
        if self._end + size > self._limit_bytes:
            return
        if os.fstat(self._file).st_size > self._end:
            os.ftruncate(self._file, self._end)
        written = os.pwrite(self._file, record, self._end)
        if written < size:
            os.ftruncate(self._file, self._end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._places[key] = self._end
        self._end += size

    def _record(self, key: int, sample: np.ndarray) -> bytes:
        tokens = sample.tobytes()
        fields = _FIELDS.pack(MAGIC, key, sample.dtype.str.encode(), sample.size, zlib.crc32(tokens))
        return fields + _CHECKSUM.pack(self._checksum(fields)) + tokens

    def _checksum(self, fields: bytes) -> int:
        return zlib.crc32(fields, self._seed)
