"""What the binaries show of the log, on standard error, and what becomes of it when nobody can read it any more."""

import contextlib
import io
import logging
import os
import sys
from typing import TextIO

from absl import flags
from absl import logging as absl_logging


class _LossyText(io.TextIOWrapper):
    """A stream that drops what cannot be written: its reader is gone, its terminal closed, or its disk full."""

    def write(self, text: str, /) -> int:
        with contextlib.suppress(OSError):
            return super().write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()


class _ClosedOutput(io.TextIOBase):
    """Standard output of a program that was started without one: what is written there would be lost."""

    def write(self, text: str, /) -> int:
        raise OSError("standard output is closed, so the result cannot be printed. Redirect it to a file.")


class _StderrHandler(logging.StreamHandler):
    """Writes to whatever `sys.stderr` is at the moment: a progress bar stands in for it while it is shown."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def show_log() -> None:
    """Shows fiddlex's own messages as plain lines, and of other libraries warnings and errors (or by --verbosity).

    From then on a write to standard error never fails: a program goes on without its log. A write to standard output
    fails where the program was started with that closed.
    """
    _keep_streams()
    log = logging.getLogger("fiddlex")
    log.setLevel(logging.INFO)
    log.addHandler(_StderrHandler())
    log.propagate = False
    if not flags.FLAGS["verbosity"].present:
        absl_logging.set_verbosity(absl_logging.WARNING)
    # What orbax and tensorstore leave behind when a write fails; the failure itself is raised and told once.
    absl_logging.get_absl_logger().addFilter(lambda record: not record.exc_info)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    sys.unraisablehook = _print_unraisable


def _keep_streams() -> None:
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed; what is opened next would be taken for it
            nowhere = os.open(os.devnull, os.O_WRONLY)
            setattr(sys, name, _ClosedOutput() if name == "stdout" else os.fdopen(nowhere, "w", closefd=False))
    if sys.__stderr__ is not None and sys.stderr is sys.__stderr__:
        file = io.FileIO(sys.stderr.fileno(), "wb", closefd=False)
        sys.stderr = _LossyText(
            io.BufferedWriter(file), encoding=sys.stderr.encoding, errors="backslashreplace", line_buffering=True
        )


def _print_unraisable(unraisable: "sys.UnraisableHookArgs") -> None:
    """As Python does, but for what tensorstore prints of every write that ends after the one that failed."""
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)
