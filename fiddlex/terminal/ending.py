"""How a program ends with an error: it prints one message and exits with a status.

A run of several processes replaces this (`end_by`), so that one of them prints the message and all of them end.
"""

import os
import sys
from collections.abc import Callable
from typing import NoReturn


def _end_alone(message: str, status: int) -> NoReturn:
    sys.stderr.write(f"{message}\n")
    sys.exit(status)


_end: Callable[[str, int], NoReturn] = _end_alone
_crashed: Callable[[BaseException], None] = lambda error: None  # noqa: E731
_finished: Callable[[int], None] = lambda status: None  # noqa: E731


def end(message: str, status: int) -> NoReturn:
    """Prints `message` after the program's name, and ends the program with `status`."""
    _end(f"{os.path.basename(sys.argv[0])}: {message}", status)


def crashed(error: BaseException) -> None:
    """To be called with an error for which there is no message, before it ends the program with a traceback."""
    _crashed(error)


def finished(status: int) -> None:
    """To be called when a program has done its work, before it ends with `status`."""
    _finished(status)


def end_by(
    function: Callable[[str, int], NoReturn],
    *,
    crashed: Callable[[BaseException], None],
    finished: Callable[[int], None],
) -> None:
    """Replaces what `end`, `crashed` and `finished` do; `function` takes the message, with the program's name."""
    global _end, _crashed, _finished
    _end, _crashed, _finished = function, crashed, finished
