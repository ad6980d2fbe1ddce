"""Starts the processes of a run on this host, and starts them again when they fail.

A process of a run that fails makes all others fail (`fiddlex.cluster.coordinator`), on other hosts too, where a
supervisor like this one starts them again; they meet at the coordinator's port. So supervisors need no connection to
each other. All read the workdir, which all hosts share: a start after which it has no later checkpoint gained nothing.

Invariants: a mistake in the config or the data is not tried again; neither is a run that a signal to any of its
processes or supervisors has stopped, except that in an elastic run the other supervisors go on; on Linux, processes
save and end when their supervisor is killed.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from fiddlex.files.places import steps_in
from fiddlex.terminal import interrupts
from fiddlex.terminal.readable import counted, signal_name

MAX_RESTARTS = 100  # unless the user sets another number
FRUITLESS_STARTS = 3  # starts in a row without a later checkpoint, after which a supervisor gives up
# Seconds in which the other processes of this host end by themselves, once one has failed. Those that do not, such as
# stopped ones, are killed then.
_GRACE_S = 20.0
_POLL_S = 0.1
_MISUSED, _FAILED = 2, 1
_STOPPED = {128 + number for number in interrupts.STOP_SIGNALS}  # stopped after a save
# Linux sends SIGTERM to a process that runs this program first when the supervisor dies; the process saves and ends.
_MORTAL = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
os.execvp(sys.argv[1], sys.argv[1:])
"""


class Limits(NamedTuple):
    """When a supervisor gives up."""

    max_restarts: int = MAX_RESTARTS  # how often it starts the processes again
    # seconds before a restart; twice as many after each further start in a row that gained nothing
    backoff_s: float = 1.0
    elastic: bool = False  # whether the run goes on when another supervisor was asked to stop


def supervise(commands: Sequence[Sequence[str]], limits: Limits, *, workdir: Path | None, name: str = "launch") -> int:
    """Runs the processes until all have done their work, and starts all again when one fails.

    The checkpoints in `workdir` tell whether a start gained anything; None: no start does. Messages begin with `name`.

    Returns:
      The status to exit with: 0 when all processes have; 2 when one has a mistake in its config or data; 128 + N when
      signal N stopped the run; 1 when the supervisor gave up.
    """
    supervisor = _Supervisor(commands, limits, workdir, name)
    with _signals_to(supervisor):
        return supervisor.run()


class _Supervisor:
    def __init__(self, commands: Sequence[Sequence[str]], limits: Limits, workdir: Path | None, name: str):
        self._commands, self._limits, self._workdir, self._name = commands, limits, workdir, name
        self._running: list[subprocess.Popen[bytes]] = []
        self._received: int | None = None  # the signal that this supervisor was sent
        self._restarts = self._fruitless = 0

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Passes a signal on to the processes; they save and end."""
        if self._received is None:
            self._received = number
            text = f"{self._name}: {signal.Signals(number).name}: passed on to the processes, which save and end.\n"
            os.write(2, text.encode())  # a handler must not use the stream, which it may have interrupted
        for process in self._running:
            if process.poll() is None:
                process.send_signal(number)

    def run(self) -> int:
        saved = newest_step(self._workdir)
        while True:
            begun_s, statuses = time.monotonic(), self._start()
            if set(statuses) == {0}:
                if self._restarts:
                    self._log(f"done after {counted(self._restarts, 'restart')}.")
                return 0
            if _MISUSED in statuses:
                return _MISUSED
            stopped = next((status for status in statuses if status in _STOPPED), None)
            if self._received is not None:
                return stopped or 128 + self._received
            if stopped and not self._limits.elastic and set(statuses) <= {0, *_STOPPED}:
                return stopped  # a process, or a supervisor of another host, was asked to stop
            before, saved = saved, newest_step(self._workdir)
            gained = saved > before
            self._fruitless = 0 if gained else self._fruitless + 1
            reason = f"{time.monotonic() - begun_s:.0f} s after the start, {_described(statuses)}"
            if gives_up := self._gives_up(saved):
                self._log(f"{reason}. {gives_up}")
                return _FAILED
            self._restarts += 1
            wait_s = self._limits.backoff_s * 2 ** max(self._fruitless - 1, 0)
            goes_on = f"from step {saved}" if saved > 0 else "from the start, as no checkpoint is saved yet"
            self._log(f"{reason}. Restart {self._restarts} of {self._limits.max_restarts} in {wait_s:g} s, {goes_on}.")
            self._wait(wait_s)
            if self._received is not None:
                return 128 + self._received

    def _gives_up(self, saved: int) -> str:
        """Why the supervisor gives up; empty when it goes on."""
        if self._fruitless >= FRUITLESS_STARTS:
            later = f"checkpoint after step {saved}" if saved >= 0 else "checkpoint"
            return (
                f"Gives up: {self._fruitless} starts in a row saved no {later}. Mend what "
                "ended the program, which it says above, and run it again."
            )
        if self._restarts >= self._limits.max_restarts:
            return f"Gives up after --max_restarts={self._limits.max_restarts}. The same command goes on from there."
        return ""

    def _start(self) -> list[int]:
        """Starts all processes and waits for their end; returns their statuses, −N for signal N."""
        self._running = []
        for command in self._commands:
            if self._received is None:
                # In a group of its own: the supervisor alone gets the Ctrl-C of a terminal, and passes it on.
                process = subprocess.Popen([sys.executable, "-IS", "-c", _MORTAL, *command], process_group=0)
                self._running.append(process)
        if self._received is not None:  # while they were started
            self.handle(self._received, None)
        ends_s: float | None = None
        while any(process.poll() is None for process in self._running):
            if ends_s is None and any(process.poll() not in {None, 0, *_STOPPED} for process in self._running):
                ends_s = time.monotonic() + _GRACE_S
            if ends_s is not None and time.monotonic() > ends_s:
                for process in self._running:
                    process.kill()
            time.sleep(_POLL_S)
        return [process.wait() for process in self._running]

    def _wait(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while self._received is None and time.monotonic() < end_s:
            time.sleep(_POLL_S)

    def _log(self, text: str) -> None:
        print(f"{self._name}: {text}", file=sys.stderr, flush=True)


def newest_step(workdir: Path | None) -> int:
    """The step of the newest finished checkpoint in a workdir; −1 without one, or where it cannot be read."""
    if workdir is None:
        return -1
    try:
        return max(steps_in(workdir / "checkpoints"), default=-1)
    except OSError:
        return -1


@contextlib.contextmanager
def _signals_to(supervisor: _Supervisor) -> Iterator[None]:
    previous = {number: signal.signal(number, supervisor.handle) for number in interrupts.stop_signals()}
    may_leave = interrupts.may_leave_if(lambda number, times: False)  # it waits for the processes, however long
    try:
        yield
    finally:
        interrupts.may_leave_if(may_leave)
        for number, handler in previous.items():
            signal.signal(number, handler)


def _described(statuses: Sequence[int]) -> str:
    """What ended the processes: 'process 2 was killed by SIGKILL; processes 0, 1 ended with status 1'."""
    by_end: dict[str, list[int]] = {}
    # Those that a signal killed stand first, since their end made the others end.
    for status, index in sorted((status, index) for index, status in enumerate(statuses)):
        if status:
            end = f"was killed by {signal_name(-status)}" if status < 0 else f"ended with status {status}"
            by_end.setdefault(end, []).append(index)
    several = len(statuses) > 1
    parts = [f"{_named(numbers) if several else ''}{end}" for end, numbers in by_end.items()]
    return "; ".join(parts) if several else f"the process {parts[0]}"


def _named(numbers: Sequence[int]) -> str:
    return f"process{'es' * (len(numbers) > 1)} {', '.join(map(str, numbers))} "
