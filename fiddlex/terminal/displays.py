"""Where the current phase is shown: on a terminal, in a notebook, in a log, or nowhere."""

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from fiddlex.terminal.phase import Phase

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

logger = logging.getLogger(__name__)

_REFRESHES_PER_S = 4
_FIRST_LINE_S = 15.0  # a phase that lasts as long has a line in a log, and another whenever this time has doubled
_LOG_WIDTH = 120
_NOTEBOOK_S = 0.5  # between two drawings in a notebook
_CLEAR = "\r\x1b[2K\x1b[?25h"  # empties the line, and shows the cursor
_DEFAULT_WIDTH = 80
_WIDEST = 10_000  # columns of any terminal
_WATCH_S = 1.0  # between two looks at how long a phase has lasted


class Display:
    """Shows the innermost of the phases that are open; this one shows nothing."""

    is_live = False  # whether what is shown follows the phase

    def __init__(self) -> None:
        self.advanced: Callable[[], None] | None = None  # to be called when a phase has advanced

    def changed(self) -> None:
        """To be called when a phase has begun or ended."""


def display_for(phases: Sequence[Phase], *, in_log: bool) -> Display:
    """The display for this process; `in_log` says whether a log may have lines where there is nothing better."""
    if is_terminal():
        return Terminal(phases)
    if _in_kernel():
        return Notebook(phases)
    return Log(phases) if in_log else Display()


def is_terminal() -> bool:
    """Whether standard error is a terminal on which a line can be replaced."""
    return _isatty(sys.stderr) and os.environ.get("TERM", "") not in ("", "dumb")


def terminal_width() -> int:
    """The number of columns of the terminal at standard error, as it is now; 80 where that is not known."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or _DEFAULT_WIDTH
    except (OSError, ValueError, AttributeError):
        return _DEFAULT_WIDTH


class Terminal(Display):
    """One line at the bottom of the terminal, which never wraps; the log goes above it."""

    is_live = True

    def __init__(self, phases: Sequence[Phase]):
        super().__init__()
        self._phases = phases
        self._live: Live | None = None
        self._bar = "━─" if (sys.stderr.encoding or "").lower().startswith("utf") else "#-"

    def changed(self) -> None:
        if self._phases and self._live is None:
            self._live = self._make()
            self._live.start()
        elif not self._phases and self._live is not None:
            live, self._live = self._live, None
            live.stop()

    def _make(self) -> "Live":
        from rich.console import Console
        from rich.live import Live

        # The line fits the terminal as it is; rich would cut it at $COLUMNS, which readline sets to what once was true.
        console = Console(
            stderr=True, width=_WIDEST, force_terminal=True, force_jupyter=False, highlight=False, soft_wrap=True
        )
        return Live(
            console=console,
            get_renderable=self._line,
            refresh_per_second=_REFRESHES_PER_S,  # by a thread: it never holds up the main thread
            transient=True,
            redirect_stdout=_isatty(sys.stdout),
        )

    def _line(self) -> "Text":
        from rich.text import Text

        phases = self._phases[-1:]  # another thread may end the phase meanwhile
        # A character in the last column makes some terminals wrap.
        text = phases[0].line(terminal_width() - 1, bar=self._bar) if phases else ""
        return Text(text, no_wrap=True, overflow="crop", end="")

    def abandon(self) -> None:
        """Empties the line without waiting for whoever draws it."""
        self._phases = ()  # who draws it once more draws nothing
        if self._live is not None:
            with contextlib.suppress(OSError):  # the terminal may have been closed
                os.write(sys.stderr.fileno(), _CLEAR.encode())


class Notebook(Display):
    """One output of the cell. The main thread draws it, since what other threads draw may come into another cell."""

    is_live = True

    def __init__(self, phases: Sequence[Phase]):
        super().__init__()
        self._phases = phases
        self._handle: Any = None
        self._drawn_s = 0.0
        self.advanced = self._redraw

    def _redraw(self) -> None:
        if time.monotonic() - self._drawn_s >= _NOTEBOOK_S:
            self.changed()

    def changed(self) -> None:
        from IPython.display import display

        self._drawn_s = time.monotonic()
        text = self._phases[-1].line(_LOG_WIDTH) if self._phases else ""
        content = {"text/plain": text}
        if self._handle is None:
            self._handle = display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)
        if not self._phases:
            self._handle = None


class Log(Display):
    """Lines of the log about phases that last."""

    def __init__(self, phases: Sequence[Phase]):
        super().__init__()
        self._phases = phases
        self._begun = threading.Event()
        self._thread: threading.Thread | None = None

    def changed(self) -> None:
        if not self._phases:
            self._begun.clear()
            return
        self._begun.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="fiddlex-progress", daemon=True)
            self._thread.start()

    def _watch(self) -> None:
        watched, line_s = None, _FIRST_LINE_S
        while self._begun.wait():
            for phase in self._phases[-1:]:
                if phase is not watched:
                    watched, line_s = phase, _FIRST_LINE_S
                if phase.logged and phase.seconds >= line_s:
                    line_s *= 2
                    logger.info("%s", phase.line(_LOG_WIDTH))
            time.sleep(_WATCH_S)


def _isatty(stream: TextIO | None) -> bool:
    """Whether a stream is a terminal; it may be closed, or None where the process was started without it."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False


def _in_kernel() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None
