"""The log that the binaries show on standard error, and how they continue when standard error cannot be written."""

import contextlib
import io
import logging
import os
import sys
import textwrap
from typing import TextIO

from absl import flags
from absl import logging as absl_logging

from fiddlex.config.displays import is_terminal, terminal_width


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
    """Writes to the current `sys.stderr`, which the line of progress replaces while it is shown.

    On a terminal, text is wrapped between words. Lines that begin with a space are commands or tables, and stay whole.
    """

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return wrapped(text, terminal_width()) if is_terminal() else text

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def wrapped(text: str, width: int) -> str:
    """`text` in lines of at most `width` characters, except for longer words and lines that begin with a space."""
    lines = []
    for line in text.split("\n"):
        if len(line) <= width or line.startswith(" "):
            lines.append(line)
        else:
            lines += textwrap.wrap(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


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
        # A descriptor of its own, so that what libraries in C++ write to the first one can go elsewhere.
        file = io.FileIO(os.dup(sys.stderr.fileno()), "wb", closefd=False)
        sys.stderr = _LossyText(
            io.BufferedWriter(file), encoding=sys.stderr.encoding, errors="backslashreplace", line_buffering=True
        )


def _print_unraisable(unraisable: "sys.UnraisableHookArgs") -> None:
    """Prints as Python does, except what tensorstore raises for each write that ends after a failed write."""
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)
