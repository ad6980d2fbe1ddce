"""The processes of a run agree on the step after which all of them stop, when one of them is asked to.

A process must not stop while another one waits for it in a collective. So each one proposes the last step that it has
dispatched, dispatches no other until all have proposed, and all stop after the largest proposal. The coordinator
collects the proposals; a thread makes that of this process, since the main thread may be waiting for the devices. When
no process has dispatched a step, there is nothing to save, and all end at once.
"""

import contextlib
import logging
import signal
import threading
from collections.abc import Callable
from typing import NoReturn

from fiddlex.cluster.peers import Peers, StopRequest
from fiddlex.errors import Stopped
from fiddlex.terminal import interrupts

logger = logging.getLogger(__name__)


class AgreedStop:
    """What the processes have agreed on; in a run of one process, `peers` is None.

    `end` ends a process of several before its first step. In a run of one process, `Stopped` does. `logs` says whether
    this process logs for all.
    """

    def __init__(self, peers: Peers | None, end: Callable[[int], NoReturn], *, logs: bool = True):
        self.request: StopRequest | None = None  # why all stop, once all have agreed
        self._peers, self._end, self._logs = peers, end, logs
        self._changed = threading.Condition()
        self._dispatched = 0  # the last step that this process has dispatched, or is about to
        self._is_done = False  # whether all that had to be saved is saved
        self._asked: StopRequest | None = None  # once all have been asked to stop
        self._last: int | None = None  # the step after which all stop, once they have agreed
        if peers is not None:
            peers.follow_stop(self._propose, self._agree)

    @property
    def has_dispatched(self) -> bool:
        """Whether this process has dispatched a step, or is about to: then there is something to save."""
        return self._dispatched > 0

    def nothing_to_save(self) -> None:
        """Says that there is nothing to save any more, so that a request ends this process at once."""
        self._dispatched, self._is_done = 0, True

    def ask(self, number: int) -> None:
        """Asks all processes to stop because of signal `number`, whose handler may call this.

        Raises:
          Stopped: in a run of one process that has dispatched no step.
        """
        if self._peers is not None:
            self._peers.request_stop(number)
            return
        self.request = StopRequest(number, rank=0)
        if not self._dispatched:
            when = "after the last step" if self._is_done else "before the first step"
            self._log(f"%s: stopping {when}; nothing has to be saved.", self.request)
            interrupts.interrupt(Stopped, number)
        text = "%s: stopping after the running step and saving; a further Ctrl-C ends the run without saving."
        self._log(text, self.request)

    def goes_on(self, step: int) -> bool:
        """Whether to dispatch the step after `step`; waits while the processes agree on it."""
        if self._peers is None:
            self._dispatched = step + 1
            return self.request is None
        with self._changed:
            self._changed.wait_for(lambda: self._asked is None or self._last is not None)
            if self._last is not None and step >= self._last:
                return False
            self._dispatched = step + 1
            return True

    def _propose(self, request: StopRequest) -> int:
        """The last step that this process has dispatched; from now on it waits for the agreement."""
        with self._changed:
            self._asked = request
            dispatched = self._dispatched
        if dispatched:
            text = "%s: all processes stop after the same step and save; a further Ctrl-C ends them without saving."
            self._log(text, request)
        return dispatched

    def _agree(self, step: int) -> None:
        if not step:
            assert self._asked
            assert self._peers
            self._log("%s: all processes stop; nothing has to be saved.", self._asked)
            self._peers.finish(128 + self._asked.signal)
            self._end(128 + self._asked.signal)
        with self._changed:
            self.request, self._last = self._asked, step
            self._changed.notify_all()

    def _log(self, text: str, request: StopRequest) -> None:
        if not self._logs:
            return
        name = signal.Signals(request.signal).name
        with contextlib.suppress(RuntimeError):  # the signal interrupted another write to this stream
            logger.info(text, f"{name} to rank {request.rank}" if self._peers else name)
