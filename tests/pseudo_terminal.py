"""Runs a program in a terminal (a pty), and records what a person sees there.

The emulated screen is wider than the terminal that the program is told of, so that a line that would wrap shows as a
line that is too long.
"""

import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import pyte

_WIDE, _TALL = 500, 300

# Makes standard input the terminal that controls the session, and becomes a program. The tests may run under nohup.
IN_TERMINAL = """
import fcntl, os, signal, sys, termios
for number in (signal.SIGHUP, signal.SIGINT):
    signal.signal(number, signal.SIG_DFL)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Recording:
    """A program that runs in a terminal, and what it has shown.

    Attributes:
      last_lines: the line at the bottom whenever it has changed, in order; a line of progress, or one of the log.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", terminal: int):
        self.last_lines: list[str] = []
        self._process, self._terminal = process, terminal
        self._screen = pyte.Screen(_WIDE, _TALL)
        self._stream = pyte.ByteStream(self._screen)

    @property
    def lines(self) -> list[str]:
        """The lines of the screen, without those at its end that are empty."""
        rows = self._screen.buffer  # holds what was drawn; `Screen.display` takes a second on a busy machine
        drawn = [rows[y] for y in range(max(rows, default=-1) + 1)]
        lines = ["".join(row[x].data for x in range(max(row, default=-1) + 1)).rstrip() for row in drawn]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    @property
    def cursor_is_hidden(self) -> bool:
        """Whether the program has hidden the cursor."""
        return bool(self._screen.cursor.hidden)

    def resize(self, columns: int) -> None:
        """Gives the terminal another width."""
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def follow(self, until: Callable[[], bool] = lambda: False, *, limit_s: float = 120) -> None:
        """Reads what the program shows until it has ended, or `until` is true.

        Raises:
          TimeoutError: when neither happens in time; the program is killed.
        """
        end_s = time.monotonic() + limit_s
        while not until():
            if time.monotonic() > end_s:
                self._process.kill()
                raise TimeoutError("\n".join(self.lines))
            if not select.select([self._terminal], [], [], 0.05)[0]:
                continue
            try:
                data = os.read(self._terminal, 2**16)
            except OSError:  # the program has ended
                data = b""
            if not data:
                break
            self._stream.feed(data)
            lines = self.lines
            if lines and self.last_lines[-1:] != lines[-1:]:
                self.last_lines.append(lines[-1])

    def follow_to(self, text: str, *, limit_s: float = 120) -> None:
        """Reads until `text` is on the screen; asserts that it comes before the end."""
        self.follow(lambda: any(text in line for line in self.lines), limit_s=limit_s)
        assert any(text in line for line in self.lines), "\n".join(self.lines)

    def ended(self) -> int:
        """Reads to the end of the program; returns its status, −N when signal N has killed it."""
        self.follow()
        return self._process.wait(timeout=60)

    def interrupted(self) -> tuple[int, float]:
        """Presses Ctrl-C; returns the program's status, and the seconds until its end."""
        start_s = time.monotonic()
        os.write(self._terminal, b"\x03")
        return self.ended(), time.monotonic() - start_s

    def terminated(self) -> tuple[int, float]:
        """Sends SIGTERM; returns the program's status, and the seconds until its end."""
        start_s = time.monotonic()
        self._process.terminate()
        return self.ended(), time.monotonic() - start_s

    def phases(self) -> list[str]:
        """The phases that the line of progress has shown, in order, each once in a row."""
        starts = ("Importing", "Starting", "Building", "Reading", "Tracing", "Compiling", "Making", "Training")
        starts += ("Evaluating", "Saving", "Writing", "Sampling")
        found: list[str] = []
        for line in self.last_lines:
            word = line.partition(" ")[0]
            if word in starts and found[-1:] != [word]:
                found.append(word)
        return found


@contextlib.contextmanager
def recorded(command: Sequence[str], environment: Mapping[str, str], *, columns: int = 80) -> Iterator[Recording]:
    """Runs a command in a terminal of so many columns; leaving the context kills it if it still runs."""
    terminal, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", IN_TERMINAL, *command],
        stdin=child,
        stdout=child,
        stderr=child,
        start_new_session=True,
        env={**environment, "TERM": "xterm", "PYTHONIOENCODING": "utf-8"},
    )
    os.close(child)
    try:
        yield Recording(process, terminal)
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
