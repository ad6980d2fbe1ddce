"""Signals that ask a run to stop: it finishes the running step, saves, and ends."""

import signal
import threading
from types import FrameType

from fiddlex.cluster import processes
from fiddlex.cluster.peers import StopRequest
from fiddlex.cluster.stopping import stop_signals


class StopSignals:
    """Turns SIGINT, SIGTERM and SIGHUP into a request to stop after the running step. A context manager.

    Before the first step there is nothing to save, and the request ends the run at once.

    A signal to one of several processes stops all of them after the same step.

    Attributes:
      received: the first signal that this process received; None before any.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._agreed = processes.agreed_stop()
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():  # Python allows no handlers in other threads
            for number in stop_signals():
                self._previous[number] = signal.signal(number, self._handle)
        return self

    @property
    def stopped_by(self) -> StopRequest | None:
        """The first signal that any process received, and its rank; None before the processes have agreed to stop."""
        return self._agreed.request

    def goes_on(self, step: int) -> bool:
        """Whether to take the step after `step`."""
        return self._agreed.goes_on(step)

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.received:  # launchers may send SIGTERM more than once
            self.received = signal.Signals(number)
            self._agreed.ask(number)
