"""How the main thread of a process spends its time: a stopwatch that always runs, for one activity at a time.

Invariant: every moment since the start belongs to exactly one activity, so that the seconds of all activities add up to
the time since the start.
"""

import contextlib
import enum
import time
from collections.abc import Iterator

Seconds = dict["Activity", float]


class Activity(enum.StrEnum):
    """What the main thread does; the values complete the sentence "the process is …"."""

    STARTING = "starting"
    COMPILATION = "compiling"
    HOST = "busy on the host"  # dispatches steps, logs
    DEVICES = "waiting for the devices"
    DATA = "waiting for the next batch"  # while the devices have work
    STARVED = "waiting for the next batch, as the devices are"
    CHECKPOINTS = "saving a checkpoint"
    EVALUATION = "evaluating"
    PROFILING = "starting or writing a profile"


class Stopwatch:
    """Measures one activity at a time, at first `Activity.STARTING`.

    Args:
      start_s: when the process started, by the monotonic clock; None: now.

    Attributes:
      start_s: when the process started, by the monotonic clock.
      activity: what the main thread does now; other threads may read it.
    """

    def __init__(self, start_s: float | None = None):
        self.start_s = self._since_s = time.monotonic() if start_s is None else start_s
        self.activity = Activity.STARTING
        self._seconds = dict.fromkeys(Activity, 0.0)

    def begin(self, activity: Activity) -> Activity:
        """Ends the current activity and begins another one; returns the one that has ended."""
        now = time.monotonic()
        self._seconds[self.activity] += now - self._since_s
        previous, self.activity, self._since_s = self.activity, activity, now
        return previous

    @contextlib.contextmanager
    def measure(self, activity: Activity) -> Iterator[None]:
        """Interrupts the current activity by another one while the body runs."""
        previous = self.begin(activity)
        try:
            yield
        finally:
            self.begin(previous)

    @contextlib.contextmanager
    def measure_call(self) -> Iterator[None]:
        """Measures a call that dispatches work: what the thread does not spend computing, it waits for the devices.

        On CPUs with several processes, the call itself waits for the other processes.
        """
        start_s, start_cpu_s = time.monotonic(), time.thread_time()
        try:
            yield
        finally:
            waited_s = (time.monotonic() - start_s) - (time.thread_time() - start_cpu_s)
            self.move(max(waited_s, 0.0), self.activity, Activity.DEVICES)

    def move(self, seconds: float, source: Activity, target: Activity) -> None:
        """Counts seconds that were measured for one activity as time of another."""
        self._seconds[source] -= seconds
        self._seconds[target] += seconds

    def seconds(self) -> Seconds:
        """The seconds of each activity since the start."""
        self.begin(self.activity)
        return dict(self._seconds)


class Lap:
    """The seconds of each activity between two calls of `take`.

    Args:
      stopwatch: the stopwatch to read.
      before: the seconds at which the first lap begins; None: the stopwatch's start.
    """

    def __init__(self, stopwatch: Stopwatch, before: Seconds | None = None):
        self._stopwatch = stopwatch
        self._before = before or dict.fromkeys(Activity, 0.0)

    def take(self) -> Seconds:
        """The seconds of each activity in the lap that ends now; the next lap begins."""
        before, self._before = self._before, self._stopwatch.seconds()
        return {activity: seconds - before[activity] for activity, seconds in self._before.items()}
