"""Scalars in TensorBoard's event files.

They are written by the thread that calls. tensorboardX's `SummaryWriter` has a thread of its own for it, and when that
thread dies, as on a full disk, the next call waits for it for ever.
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
    """A new event file.

    Args:
      directory: of TensorBoard's files; made if need be.
      purge_step: TensorBoard forgets what earlier files of the directory have of this step and later ones.

    Raises:
      OSError: from here and from every method, when the file cannot be written.
    """

    def __init__(self, directory: Path, *, purge_step: int):
        directory.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self._file = RecordWriter(str(directory / name))
        self._flushed_s = time.monotonic()
        self._write(Event(file_version="brain.Event:2"), step=0)
        self._write(Event(session_log=SessionLog(status=SessionLog.START)), step=purge_step)

    def write(self, scalars: Mapping[str, float], *, step: int) -> None:
        """Appends numbers under their names; they are in the file ten seconds later, or when the next ones come."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._write(Event(summary=Summary(value=values)), step=step)
        if time.monotonic() - self._flushed_s > _FLUSH_EVERY_S:
            self._file.flush()
            self._flushed_s = time.monotonic()

    def close(self) -> None:
        """Writes what is left and closes the file."""
        self._file.close()

    def _write(self, event: Event, *, step: int) -> None:
        event.wall_time, event.step = time.time(), step
        self._file.write(event.SerializeToString())
