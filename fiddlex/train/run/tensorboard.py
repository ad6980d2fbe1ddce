"""Scalars in TensorBoard's event files.

The calling thread writes them. tensorboardX's `SummaryWriter` writes from a thread of its own; when that thread dies,
for example on a full disk, the next call waits for it forever.
"""

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import RecordWriter

_FLUSH_EVERY_S = 10.0


class EventFile:
    """A new event file, which the first `write` makes: a run that ends before leaves no empty one.

    Args:
      directory: the directory of TensorBoard's files; created if needed.
      purge_step: TensorBoard ignores this step and later ones in earlier files of the directory.

    Raises:
      OSError: from the constructor and every method, when the directory or the file cannot be written.
    """

    def __init__(self, directory: Path, *, purge_step: int):
        directory.mkdir(exist_ok=True)
        self._directory, self._purge_step = directory, purge_step
        self._file: RecordWriter | None = None
        self._flushed_s = time.monotonic()

    def _opened(self) -> RecordWriter:
        """The file, with what it begins with."""
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        file = RecordWriter(str(self._directory / name))
        _write(file, Event(file_version="brain.Event:2"), step=0)
        _write(file, Event(session_log=SessionLog(status=SessionLog.START)), step=self._purge_step)
        return file

    def write(self, scalars: Mapping[str, float], *, step: int) -> None:
        """Appends numbers under their names; flushes the file if the last flush was more than ten seconds ago."""
        self._file = self._file or self._opened()
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        _write(self._file, Event(summary=Summary(value=values)), step=step)
        if time.monotonic() - self._flushed_s > _FLUSH_EVERY_S:
            self._file.flush()
            self._flushed_s = time.monotonic()

    def close(self) -> None:
        """Writes buffered events and closes the file."""
        if self._file is not None:
            self._file.close()


def _write(file: RecordWriter, event: Event, *, step: int) -> None:
    event.wall_time, event.step = time.time(), step
    file.write(event.SerializeToString())
