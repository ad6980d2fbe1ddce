"""A stopwatch of the main thread. Invariant: each moment since the start belongs to exactly one activity."""

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
    """Measures one activity at a time, at first `Activity.STARTING`. The process started at `start_s`; None: now."""

    def __init__(self, start_s: float | None = None):
        self.start_s = self._since_s = time.monotonic() if start_s is None else start_s  # monotonic clock
        self.activity = Activity.STARTING  # of the main thread; other threads may read it
        self._seconds = dict.fromkeys(Activity, 0.0)

    def begin(self, activity: Activity) -> Activity:
        """Begins another activity; returns the one that this ends."""
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
        """Counts seconds that were measured for `source` as time of `target`."""
        self._seconds[source] -= seconds
        self._seconds[target] += seconds

    def seconds(self) -> Seconds:
        """The seconds of each activity since the start."""
        self.begin(self.activity)
        return dict(self._seconds)


class Lap:
    """The seconds of each activity between calls of `take`; the first lap begins at `before` (None: at the start)."""

    def __init__(self, stopwatch: Stopwatch, before: Seconds | None = None):
        self._stopwatch = stopwatch
        self._before = before or dict.fromkeys(Activity, 0.0)

    def take(self) -> Seconds:
        """The seconds of each activity in the lap that ends now; the next lap begins."""
        before, self._before = self._before, self._stopwatch.seconds()
        return {activity: seconds - before[activity] for activity, seconds in self._before.items()}
