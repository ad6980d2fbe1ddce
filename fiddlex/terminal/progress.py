"""What a program is doing now, for the person who waits for it: phases, such as "Compiling the train step".

    with phase("Evaluating", total=32, unit="batches") as evaluating:
        for number, batch in enumerate(batches, start=1):
            ...
            evaluating.advance(number)

The innermost phase is shown: on a terminal as one line at its bottom, in a notebook as one output that is replaced,
and in the log of a command without a terminal as a line now and then, if the phase lasts. A library that runs without
a terminal and without a notebook shows nothing (`fiddlex.terminal.displays`). Like logging, this is state of the
process; only the main thread has phases. Invariant: on a terminal and in a log, drawing never holds up the main thread.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator

from fiddlex.terminal.displays import Display, Terminal, display_for
from fiddlex.terminal.phase import Phase

_open: list[Phase] = []  # the innermost last
_display: Display | None = None  # chosen when the first phase begins


@contextlib.contextmanager
def phase(
    text: str,  # as in "Evaluating"
    *,
    total: float = 0,  # units of work; 0: not known
    unit: str = "",  # what the units are called, as in "batches"
    number: Callable[[float], str] = "{:,.0f}".format,  # of units, as text; `readable_size` for bytes
    time_left: Callable[[], str] | None = None,  # as text; None: estimated from the units done so far
    logged: bool = True,  # whether a log without a terminal gets lines about it; False where the program logs its own
) -> Iterator[Phase]:
    """Shows what the body does while it runs; the phase's `advance` says how much is done."""
    entered = Phase(text, total=total, unit=unit, number=number, time_left=time_left, logged=logged)
    if not _has_phases():
        yield entered
        return
    display = _chosen()
    entered.advanced = display.advanced
    try:
        _open.append(entered)
        display.changed()  # a signal may end the program in here too
        yield entered
    finally:
        if entered in _open:
            _open.remove(entered)
        display.changed()


def is_shown() -> bool:
    """Whether a terminal or a notebook shows the current phase of this thread, so that a log need not repeat it."""
    return _has_phases() and bool(_open) and _chosen().is_live


def show_in_log() -> None:
    """Lets phases that last have lines in the log where there is no terminal; for commands."""
    global _display
    _display = display_for(_open, in_log=True)


def show_nothing() -> None:
    """Shows no phases from now on; for processes whose output somebody else tells."""
    global _display
    _display = Display()


def leave_terminal() -> None:
    """Puts the terminal back as it was, from any thread, before the process ends without cleaning up."""
    if isinstance(_display, Terminal):
        _display.abandon()


def _has_phases() -> bool:
    """Whether this thread is the one whose phases are shown."""
    return threading.current_thread() is threading.main_thread()


def _chosen() -> Display:
    global _display
    if _display is None:
        _display = display_for(_open, in_log=False)
    return _display
