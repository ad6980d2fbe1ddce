"""A phase of a program, and the line of text that tells of it."""

import math
import time
from collections.abc import Callable

from fiddlex.terminal.readable import readable_time

_LEAST_BAR, _MOST_BAR = 10, 40  # cells
_SHOWN_FROM_S = 1.0  # of a phase that counts nothing, the seconds are shown from here on


class Phase:
    """What a program does for a while, and how far it is; `fiddlex.terminal.progress.phase` has the same arguments."""

    def __init__(
        self,
        text: str,
        *,
        total: float = 0,
        unit: str = "",
        number: Callable[[float], str] = "{:,.0f}".format,
        time_left: Callable[[], str] | None = None,
        logged: bool = True,
    ):
        self.logged = logged
        self.advanced: Callable[[], None] | None = None  # is called at each `advance`
        self.total = total  # may be set later
        self._text, self._unit, self._number = text, unit, number
        self._time_left = time_left or self._estimate
        self._began_s = time.monotonic()
        self._done: float = 0
        self._details: tuple[str, ...] = ()
        self._first: tuple[float, float] | None = None  # units done and time of the first report
        self._last = (0.0, self._began_s)

    def advance(self, done: float, *details: str) -> None:
        """Notes the units done, an earlier run's too, and texts to show, most important first; none: as last given."""
        self._done, self._last = done, (done, time.monotonic())
        self._first = self._first or self._last
        self._details = details or self._details
        if self.advanced:
            self.advanced()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began_s

    def line(self, width: int, *, bar: str = "") -> str:
        """The phase as one line of at most `width` characters.

        `bar` has the characters of the full and the empty part of a bar; empty: no bar. What does not fit is left out:
        first the bar, then the details, the least important first, then the number of units, then the time; at last the
        text itself is cut.
        """
        details = list(self._details)
        count, left = self._count(), self._time_left() if self.total else self._elapsed()
        while True:
            parts = [part for part in (self._text, count, *details, left) if part]
            line = "  ".join(parts)
            if len(line) <= width or len(parts) == 1:
                break
            if details:
                details.pop()
            elif count:
                count = ""
            else:
                left = ""
        room = min(width - len(line) - 2, _MOST_BAR)
        if bar and self.total and room >= _LEAST_BAR:
            filled = round(room * min(self._done / self.total, 1))
            line = "  ".join([parts[0], bar[0] * filled + bar[1] * (room - filled), *parts[1:]])
        return line if len(line) <= width else f"{line[: max(width - 1, 0)]}…"[:width]

    def _count(self) -> str:
        if not self.total:
            return ""
        return f"{self._number(self._done)}/{self._number(self.total)} {self._unit}".rstrip()

    def _elapsed(self) -> str:
        seconds = self.seconds
        return _whole(int(seconds)) if seconds >= _SHOWN_FROM_S else ""

    def _estimate(self) -> str:
        """The time left: the first unit, which may compile, does not count."""
        (done, last_s), first = self._last, self._first
        if first is None or done <= first[0]:
            return self._elapsed()
        left_s = (last_s - first[1]) / (done - first[0]) * (self.total - done) - (time.monotonic() - last_s)
        return f"{_whole(max(left_s, 0))} left" if done < self.total else ""


def _whole(seconds: float) -> str:
    """The time in whole seconds, which does not flicker."""
    return readable_time(seconds) if seconds >= 60 else f"{math.ceil(seconds)} s"
