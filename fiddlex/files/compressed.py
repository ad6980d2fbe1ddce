"""Files of text that may be compressed, as .gz or .zst.

Invariant: a text or line of a compressed file takes no more memory than `MOST_TEXT` and `MOST_RATIO` allow; one that is
longer is refused.
"""

import contextlib
import gzip
import io
import os
import zlib
from collections.abc import Iterator
from typing import IO, Any, cast

from fiddlex.errors import DataError, installation

MOST_TEXT = 2**28  # bytes of a text in a compressed file, or if that is more, so many times the file's:
MOST_RATIO = 64
_ENDS = (".gz", ".zst")
_CHUNK = 2**20  # bytes that are decompressed at once


def is_compressed(file: str) -> bool:
    return file.lower().endswith(_ENDS)


@contextlib.contextmanager
def opened(file: str) -> Iterator[IO[bytes]]:
    """Opens a file, decompressed, and turns errors of its compression into DataErrors."""
    stream: IO[bytes]
    if file.lower().endswith(".gz"):
        stream = cast(IO[bytes], gzip.open(file, "rb"))  # noqa: SIM115
    elif file.lower().endswith(".zst"):
        stream = _open_zst(file)
    else:
        stream = open(file, "rb")  # noqa: SIM115
    try:
        with stream:
            yield stream
    except Exception as error:
        if isinstance(error, EOFError | gzip.BadGzipFile | zlib.error) or "Zstd" in type(error).__name__:
            raise DataError(f"{file} is truncated or damaged: {error}. Copy it again.") from error
        raise


def read_text(stream: IO[bytes], file: str) -> bytes:
    """All bytes of an opened file; DataError when a compressed file becomes larger than the invariant allows."""
    most = _most_text(file)
    if most < 0:
        return stream.read()
    pieces, left = list[bytes](), most  # Python would allocate `most` bytes at once, whatever the file has
    while left and (piece := stream.read(min(left, _CHUNK))):
        pieces.append(piece)
        left -= len(piece)
    data = b"".join(pieces)
    _check_end(file, data, stream)
    return data


def lines(stream: IO[bytes], file: str) -> Iterator[bytes]:
    """The lines of an opened file, with their ends; DataError when one of a compressed file is longer than allowed."""
    most = _most_text(file)
    while line := stream.readline(most):
        if not line.endswith(b"\n"):
            _check_end(file, line, stream)
        yield line


def _most_text(file: str) -> int:
    """The most bytes that a text of a compressed file may have; no limit (-1) where the file itself has the bytes."""
    return max(MOST_TEXT, MOST_RATIO * os.path.getsize(file)) if is_compressed(file) else -1


def _check_end(file: str, data: bytes, stream: IO[bytes]) -> None:
    """Raises DataError when a text of a compressed file goes on after `data`."""
    if len(data) == _most_text(file) and stream.read(1):
        raise DataError(
            f"{file} has {os.path.getsize(file):,} bytes, and a text of more than {len(data):,} once it is "
            "decompressed: hardly any text becomes so much smaller. If it is one, decompress it and name that file."
        )


def _open_zst(file: str) -> IO[bytes]:
    try:
        import zstandard
    except ImportError as error:
        raise DataError(f"{file}: to read .zst install the extra zstd ({installation('zstd')}).") from error
    reader = zstandard.ZstdDecompressor().stream_reader(open(file, "rb"), read_across_frames=True, closefd=True)  # noqa: SIM115
    return io.BufferedReader(cast(Any, reader), 2**20)
