"""Standard streams that take any text, and standard error that never fails."""

import contextlib
import io
import os
import sys


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


def print_any_text() -> None:
    r"""Lets standard output print what its encoding lacks, as \xe9 or \u2026; call it before anything is printed."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a notebook's is another, which takes any text
        sys.stdout.reconfigure(errors="backslashreplace")


def keep_streams() -> None:
    """After this call a write to standard error never fails, so a program continues without its log.

    A write to standard output fails when the program was started with standard output closed.
    """
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
