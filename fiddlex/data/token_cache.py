"""Tokens of text in a file: one process reads and tokenizes a source, and all processes map the same file.

So each process holds only the pages with the tokens of its own examples, and a restart tokenizes nothing. The name of a
file is a hash of everything that its tokens follow from. It holds, without gaps:

    the tokens of each stream, little-endian, each stream from a multiple of 8 bytes on
    the description (JSON): the hash, and of each stream its place, dtype, checksum and the fields of `TokenStream`
    uint64, uint32         bytes of the description, and its CRC-32
    8 bytes                `MAGIC`

Invariant: a file has its name only when it is complete. Before the first process uses a file it compares all checksums,
and it makes a damaged file again; the other processes check the description and the size.
"""

import hashlib
import itertools
import json
import logging
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fiddlex.cluster import processes
from fiddlex.cluster.shared_files import not_seen_by
from fiddlex.data.token_stream import TokenStream
from fiddlex.errors import DataError, DeviceError
from fiddlex.files.small_files import check_regular, json_object
from fiddlex.files.whole_files import remove_leftovers, replacing

logger = logging.getLogger(__name__)

SUFFIX = ".tokens"
MAGIC = b"FXTOKEN1"
SILENCE_S = 600.0  # without a new token, after which the other processes give up
DTYPES = ("|u1", "<u2", "<u4")  # of tokens, as numpy writes them
_END = struct.Struct("<QI8s")
_ALIGNMENT = 8  # bytes
_CHUNK_TOKENS = 2**22
_POLL_S, _POST_S = 0.1, 1.0

_numbers = itertools.count()  # of the calls; all processes make the same calls in the same order

Progress = Callable[[int], None]  # takes the tokens made since the last call


def cached_streams(
    folder: Path,
    source: str,
    *,
    made_from: Callable[[], Mapping[str, Any]],
    read: Callable[[Progress], Sequence[TokenStream]],
) -> list[TokenStream]:
    """The streams that `read` returns, mapped from a file in `folder`, which all processes of the run must share.

    The first process alone calls `made_from`, which returns what the streams follow from as values of JSON, and, unless
    the file is there, `read`, which reads, tokenizes and reports its progress. `source` is for messages.

    Raises:
      DataError: when the file cannot be written, or some processes do not see it.
      DeviceError: when the first process makes no token for `SILENCE_S` seconds.
    """
    name = f"tokens of {source} {next(_numbers)}"
    if processes.is_first():
        digest = hashlib.sha256(json.dumps(made_from(), sort_keys=True).encode()).hexdigest()[:24]
        streams = _found_or_made(folder / f"{digest}{SUFFIX}", digest, source, lambda: read(_posting(name)))
        processes.post(name, {"digest": digest})
    else:
        digest, streams = _told(name, source), []
    file = folder / f"{digest}{SUFFIX}"

    def is_seen() -> bool:
        nonlocal streams
        try:
            streams = streams or _opened(file, digest)
        except ValueError:
            return False
        return True

    if blind := not_seen_by(f"look at {file.name}", is_seen):
        raise DataError(
            f"{blind} cannot read {file}, to which rank 0 has written the tokens of {source}. Set data.cache to a "
            "folder that all hosts share and whose files all processes may read."
        )
    return streams


def _found_or_made(
    file: Path, digest: str, source: str, make: Callable[[], Sequence[TokenStream]]
) -> list[TokenStream]:
    """The streams of `file`, which is written if it is not there or damaged."""
    try:
        streams = _opened(file, digest)
        _check_tokens(file, streams)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        logger.warning("%s is damaged and is made again: %s", file, error)
    else:
        logger.info("%s: the tokens are in %s.", source, file)
        return streams
    logger.info("%s: reading and tokenizing, once for all processes; the tokens will be in %s.", source, file)
    streams = list(make())
    try:
        _write(file, digest, streams)
        return _opened(file, digest)
    except OSError as error:
        raise DataError(
            f"Cannot write the tokens of {source} to {file}: {error.strerror or error}. Make room or permit writing "
            "there, or set data.cache to another folder that all hosts share."
        ) from error


def _posting(name: str) -> Progress:
    """Shows the others how many tokens have been made, at most once in `_POST_S` seconds."""
    made, posted_s = 0, time.monotonic()

    def post(more: int) -> None:
        nonlocal made, posted_s
        made += more
        if time.monotonic() - posted_s > _POST_S:
            posted_s = time.monotonic()
            processes.post(name, {"made": made})

    return post


def _told(name: str, source: str) -> str:
    """The digest of the file that the first process names once it is there."""
    said: dict[str, Any] = {}
    heard_s = time.monotonic()
    while "digest" not in said:
        now = processes.posted(name).get(0, {})
        if now != said:
            said, heard_s = now, time.monotonic()
        elif time.monotonic() - heard_s > SILENCE_S:
            raise DeviceError(  # a supervisor may try this again
                f"This process waits for rank 0 to read and tokenize {source}, and rank 0 has made no token for "
                f"{SILENCE_S:g} s ({said.get('made', 0):,} before). Look at the file system of the source and at the "
                "log of rank 0. Prepared data need no tokenizing: prepare_data.py makes them for data.source="
                "megatron:PREFIX."
            )
        time.sleep(_POLL_S)
    digest: str = said["digest"]
    return digest


def _write(file: Path, digest: str, streams: Sequence[TokenStream]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(file)
    with replacing(file, shared=True, synced=True) as opened:
        text = json.dumps({"digest": digest, "streams": [_written(opened, stream) for stream in streams]}).encode()
        opened.write(text + _END.pack(len(text), zlib.crc32(text), MAGIC))


def _written(opened: BinaryIO, stream: TokenStream) -> dict[str, Any]:
    """Writes the tokens of a stream; returns its description."""
    opened.write(b"\0" * (-opened.tell() % _ALIGNMENT))
    dtype, offset = stream.tokens.dtype.newbyteorder("<"), opened.tell()
    for chunk in _chunks(stream.tokens):
        opened.write(chunk.astype(dtype, copy=False).tobytes())
    return {
        "offset": offset,
        "length": len(stream),
        "dtype": dtype.str,
        "checksum": _checksum(stream.tokens),
        "num_bytes": stream.num_bytes,
        "num_documents": stream.num_documents,
        "separator": stream.separator,
        "unit": stream.unit,
    }


def _opened(file: Path, digest: str) -> list[TokenStream]:
    """The streams of a file; their tokens are not compared with their checksums.

    Raises:
      ValueError: when the file is not complete, or was made from something else.
      OSError: when it cannot be read.
    """
    text = _description(file)
    described = _streams(text, digest)
    mapped = np.memmap(file, np.uint8, mode="r")
    streams = []
    for each in described:
        dtype, offset = np.dtype(each["dtype"]), each["offset"]
        stop = offset + each["length"] * dtype.itemsize
        if stop > len(mapped) - len(text) - _END.size:
            raise ValueError(f"it has {len(mapped):,} bytes, which is too few")
        fields = {name: each[name] for name in ("num_bytes", "num_documents", "separator", "unit")}
        streams.append(TokenStream(mapped[offset:stop].view(dtype), **fields))
    return streams


def _streams(text: bytes, digest: str) -> list[dict[str, Any]]:
    """The descriptions of the streams; raises ValueError unless every value is one that `_written` may have written."""
    said = json_object(text)
    if said.get("digest") != digest:
        raise ValueError(f"it was made from something else ({said.get('digest')!r:.80})")
    described = said.get("streams")
    if not isinstance(described, list):
        raise ValueError("its description has no streams")
    for each in described:
        match each:
            case {
                "offset": int(offset),
                "length": int(length),
                "dtype": str(dtype),
                "checksum": int(),
                "num_bytes": int() | None,
                "num_documents": int() | None,
                "separator": int() | None,
                "unit": str(),
            } if min(offset, length) >= 0 and dtype in DTYPES:
                continue
        raise ValueError(f"its description has a stream that none can be: {each!r:.200}")
    return described


def _description(file: Path) -> bytes:
    check_regular(file)
    with file.open("rb") as opened:
        size = opened.seek(0, os.SEEK_END)
        opened.seek(max(0, size - _END.size))
        end = opened.read()
        length, checksum, magic = _END.unpack(end) if len(end) == _END.size else (0, 0, b"")
        if magic != MAGIC or length > size - _END.size:
            raise ValueError(f"its {size:,} bytes do not end as they should")
        opened.seek(size - _END.size - length)
        text = opened.read(length)
    if zlib.crc32(text) != checksum:
        raise ValueError("the checksum of its description is another")
    return text


def _check_tokens(file: Path, streams: Sequence[TokenStream]) -> None:
    """Raises ValueError when the tokens are not those that were written."""
    described = json_object(_description(file))["streams"]
    for stream, each in zip(streams, described, strict=True):
        if _checksum(stream.tokens) != each["checksum"]:
            raise ValueError("the checksum of its tokens is another")


def _checksum(tokens: np.ndarray) -> int:
    checksum = 0
    for chunk in _chunks(tokens):
        checksum = zlib.crc32(np.ascontiguousarray(chunk, tokens.dtype.newbyteorder("<")).data, checksum)
    return checksum


def _chunks(tokens: np.ndarray) -> Iterator[np.ndarray]:
    return (tokens[start : start + _CHUNK_TOKENS] for start in range(0, len(tokens), _CHUNK_TOKENS))
