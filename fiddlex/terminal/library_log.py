"""What libraries in C++ write to standard error: kept from the terminal, and in a file where it may be looked up.

libtpu, XLA and others write warnings to the descriptor of standard error, past Python's logging and into the line of
progress. Where standard error is a terminal, these go to a file; elsewhere they stay in the log, which keeps them
beside what happened then. Invariant: nothing that a library has written is lost when the program fails.
"""

import contextlib
import os
import sys
import tempfile
from pathlib import Path

from fiddlex.terminal.displays import is_terminal

NAME = "libraries.log"  # in a workdir

_STDERR = 2
_file: Path | None = None  # where it goes now
_is_kept = False  # whether the file belongs to a workdir
_began = 0  # the file's size when this process began to write to it


def divert() -> None:
    """Keeps from the terminal what libraries write from now on; for commands, after `show_log`."""
    global _file
    if _file is not None or not is_terminal() or sys.stderr.fileno() == _STDERR:
        return
    with contextlib.suppress(OSError):  # without room for it, the terminal gets it as before
        number, name = tempfile.mkstemp(prefix="fiddlex-", suffix=".log")
        os.dup2(number, _STDERR)
        os.close(number)
        _file = Path(name)


def keep_in(workdir: Path) -> None:
    """Keeps it in a file of a workdir, with what was written before; the file is the end of that of earlier runs."""
    global _file, _is_kept, _began
    if _file is None or _is_kept:
        return
    path, before = workdir / NAME, _file
    with contextlib.suppress(OSError):  # without room for it, it stays where it is
        with open(path, "ab") as file:
            began = path.stat().st_size
            file.write(before.read_bytes())
            file.flush()
            os.dup2(file.fileno(), _STDERR)
        _file, _is_kept, _began = path, True, began
        before.unlink()


def told() -> str:
    """A sentence that names the file, if this process has written to it; empty otherwise."""
    if _file is None or not _written():
        return ""
    return f"Messages of XLA and other libraries are in {_file}."


def end(*, failed: bool) -> None:
    """Removes the file at the end of a program, if it is empty, or a temporary one of a program that has not failed."""
    if _file is None:
        return
    with contextlib.suppress(OSError):
        if not _file.stat().st_size or not (_is_kept or failed):
            _file.unlink()


def _written() -> bool:
    with contextlib.suppress(OSError):
        return _file is not None and _file.stat().st_size > _began
    return False
