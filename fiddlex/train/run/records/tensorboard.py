"""Scalars in TensorBoard's event files.

The calling thread writes them. tensorboardX's `SummaryWriter` writes from a thread of its own; when that thread dies,
for example on a full disk, the next call waits for it forever. Its `RecordWriter` keeps events until it is told to wait
for the disk. Invariant: as in `metrics.jsonl`, what was written stays when the process is killed, since a run that goes
on does not write it again.
"""

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c


class EventFile:
    """A new event file, which the first `write` makes: a run that ends before leaves no empty one.

    TensorBoard ignores step `purge_step` and later ones in earlier files of the directory.
    """

    def __init__(self, directory: Path, *, purge_step: int):
        directory.mkdir(exist_ok=True)
        self._directory, self._purge_step = directory, purge_step
        self._file: BinaryIO | None = None

    def _open(self) -> BinaryIO:
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self._file = (self._directory / name).open("ab")
        _write(self._file, Event(file_version="brain.Event:2"), step=0)
        _write(self._file, Event(session_log=SessionLog(status=SessionLog.START)), step=self._purge_step)
        return self._file

    def write(self, scalars: Mapping[str, float], *, step: int) -> None:
        file = self._file or self._open()
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        _write(file, Event(summary=Summary(value=values)), step=step)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _write(file: BinaryIO, event: Event, *, step: int) -> None:
    """Appends an event as a record of TensorFlow's TFRecord format: length and data, each with its checksum."""
    event.wall_time, event.step = time.time(), step
    data = event.SerializeToString()
    length = struct.pack("<Q", len(data))
    file.write(b"".join([length, _checksum(length), data, _checksum(data)]))
    file.flush()


def _checksum(data: bytes) -> bytes:
    return struct.pack("<I", masked_crc32c(data))
