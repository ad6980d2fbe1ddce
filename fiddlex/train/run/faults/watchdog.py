"""Reports a step, an evaluation or a checkpoint that takes too long, and what every thread of the process is doing.

Each process of a run has a watchdog of its own, which looks at this process alone. It ends nothing.
"""

import contextlib
import faulthandler
import logging
import threading
import time
from pathlib import Path
from typing import NamedTuple

import jax

from fiddlex.files.whole_files import unused
from fiddlex.train.step.stopwatch import Stopwatch

logger = logging.getLogger(__name__)

FOLDER = "stacks"  # of the workdir, with the reports


class _Watched(NamedTuple):
    what: str
    since_s: float


class Watchdog:
    """A thread that sleeps while all goes well; with `timeout_s` 0 it never starts. A context manager."""

    def __init__(self, workdir: Path, timeout_s: float, stopwatch: Stopwatch):
        self._folder, self._timeout_s, self._stopwatch = workdir / FOLDER, timeout_s, stopwatch
        self._watched: _Watched | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="fiddlex-watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self._timeout_s:
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed.set()
        if self._timeout_s:
            self._thread.join()

    def begin(self, what: str) -> None:
        """Watches something in place of the last; `what` begins a sentence ('Step 3'); an empty one watches nothing."""
        self._watched = _Watched(what, time.monotonic()) if what else None

    def _watch(self) -> None:
        reported: _Watched | None = None
        left_s = self._timeout_s
        while not self._closed.wait(left_s):
            watched, now, left_s = self._watched, time.monotonic(), self._timeout_s
            if watched is None or watched is reported:
                continue
            if now - watched.since_s >= self._timeout_s:
                self._report(watched, now - watched.since_s)
                reported = watched
            else:
                left_s -= now - watched.since_s

    def _report(self, watched: _Watched, seconds: float) -> None:
        rank = jax.process_index()
        path = unused(self._folder, f"rank{rank}-{{}}.txt")
        text = (
            f"{watched.what} has taken {seconds:.0f} s so far, more than train.step_timeout_s={self._timeout_s:g}; "
            f"this process is {self._stopwatch.activity}."
        )
        where = f"The stacks of its threads could not be written to {path}"
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as file:  # never through a link that somebody has put there
                file.write(f"Rank {rank}: {text}\n\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
            where = f"The stacks of its threads are in {path}"
        logger.warning("%s %s.", text, where)
