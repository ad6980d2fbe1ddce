"""The log that the binaries show on standard error, and how they continue when standard error cannot be written."""

import contextlib
import io
import logging
import os
import sys
from typing import TextIO

from absl import flags
from absl import logging as absl_logging


class _LossyText(io.TextIOWrapper):
    """A stream that drops text it cannot write, because its reader exited, its terminal closed or its disk is full."""

    def write(self, text: str, /) -> int:
        with contextlib.suppress(OSError):
            return super().write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()


class _ClosedOutput(io.TextIOBase):
    """Standard output of a program that was started with it closed: writing raises, since the text would be lost."""

    def write(self, text: str, /) -> int:
        raise OSError("standard output is closed, so the result cannot be printed. Redirect it to a file.")


class _StderrHandler(logging.StreamHandler):
    """Writes to the current `sys.stderr`, which a progress bar replaces while it is shown."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def show_log() -> None:
    """Shows fiddlex's messages as plain lines, and warnings and errors of other libraries (--verbosity changes that).

    After this call a write to standard error never fails, so a program continues without its log. A write to standard
    output fails when the program was started with standard output closed.
    """
    _keep_streams()
    log = logging.getLogger("fiddlex")
    log.setLevel(logging.INFO)
    log.addHandler(_StderrHandler())
    log.propagate = False
    if not flags.FLAGS["verbosity"].present:
        absl_logging.set_verbosity(absl_logging.WARNING)
    # Drops what orbax and tensorstore log after a failed write; the failure itself is raised and reported once.
    absl_logging.get_absl_logger().addFilter(lambda record: not record.exc_info)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    sys.unraisablehook = _print_unraisable


def _keep_streams() -> None:
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed; the next file opened would get its descriptor
            nowhere = os.open(os.devnull, os.O_WRONLY)
            setattr(sys, name, _ClosedOutput() if name == "stdout" else os.fdopen(nowhere, "w", closefd=False))
    if sys.__stderr__ is not None and sys.stderr is sys.__stderr__:
        file = io.FileIO(sys.stderr.fileno(), "wb", closefd=False)
        sys.stderr = _LossyText(
            io.BufferedWriter(file), encoding=sys.stderr.encoding, errors="backslashreplace", line_buffering=True
        )


def _print_unraisable(unraisable: "sys.UnraisableHookArgs") -> None:
    """Prints as Python does, except what tensorstore raises for each write that ends after a failed write."""
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)
