"""Signals that ask a run to stop: it finishes the running step, saves, and ends."""

import signal
import threading
from types import FrameType

from fiddlex.cluster import processes
from fiddlex.cluster.peers import StopRequest
from fiddlex.terminal import interrupts


class StopSignals:
    """Turns `STOP_SIGNALS` into a request to stop after the running step. A context manager.

    Before the first step there is nothing to save, and the request ends the run at once. A signal to one of several
    processes stops all of them after the same step.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None  # the first signal that this process received
        self._agreed = processes.agreed_stop()
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():  # Python allows no handlers in other threads
            for number in interrupts.stop_signals():
                self._previous[number] = signal.signal(number, self._handle)
        self._may_leave = interrupts.may_leave_if(self._leaves)
        return self

    @property
    def stopped_by(self) -> StopRequest | None:
        """The first signal that any process received, and its rank; None before the processes have agreed to stop."""
        return self._agreed.request

    @property
    def ends_now(self) -> StopRequest | None:
        """Why a run of one process shall do nothing more than save; None in a run of several."""
        # Several would have to agree on what each of them has begun.
        return self.stopped_by if processes.num_processes() == 1 else None

    def goes_on(self, step: int) -> bool:
        """Whether to take the step after `step`."""
        return self._agreed.goes_on(step)

    def nothing_to_save(self) -> None:
        """Says that the run has saved all that it will save: from now on a signal ends it at once."""
        self._agreed.nothing_to_save()

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        if self.received is None:  # or what the run still prints about its end would be cut off
            interrupts.may_leave_if(self._may_leave)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if interrupts.postponed(number):
            return
        if self.received and number == signal.SIGINT:
            interrupts.interrupt(KeyboardInterrupt)
        interrupts.tell()
        if not self.received:  # launchers may send SIGTERM more than once
            self.received = signal.Signals(number)
            self._agreed.ask(number)

    def _leaves(self, number: signal.Signals, times: int) -> bool:
        """Whether a signal ends the process where the program has not ended soon after it; see `interrupts`."""
        if processes.num_processes() > 1:
            # The main thread may be in XLA's compiler, and have run no handler yet.
            if self.received is None:
                self._agreed.ask(number)
            return False
        return not self._agreed.has_dispatched or (times > 1 and number == signal.SIGINT)
