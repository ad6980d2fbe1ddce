"""The processes of a run agree on the step after which all of them stop, when one of them is asked to.

A process must not stop while another one waits for it in a collective. So each one proposes the last step that it has
dispatched, dispatches no other until all have proposed, and all stop after the largest proposal. The coordinator
collects the proposals; a thread makes that of this process, since the main thread may be waiting for the devices.
"""

import contextlib
import logging
import signal
import threading

from fiddlex.cluster.peers import Peers, StopRequest

logger = logging.getLogger(__name__)


class AgreedStop:
    """What the processes have agreed on.

    Args:
      peers: the connection to the other processes; None in a run of one process.

    Attributes:
      request: why all stop; None before all have agreed.
    """

    def __init__(self, peers: Peers | None):
        self.request: StopRequest | None = None
        self._peers = peers
        self._changed = threading.Condition()
        self._dispatched = 0  # the last step that this process has dispatched, or is about to
        self._asked: StopRequest | None = None  # once all have been asked to stop
        self._last: int | None = None  # the step after which all stop, once they have agreed
        if peers is not None:
            peers.follow_stop(self._propose, self._agree)

    def ask(self, number: int) -> None:
        """Asks all processes to stop because of signal `number`, whose handler may call this."""
        if self._peers is None:
            self.request = StopRequest(number, rank=0)
        else:
            self._peers.request_stop(number)

    def goes_on(self, step: int) -> bool:
        """Whether to dispatch the step after `step`; waits while the processes agree on it."""
        if self._peers is None:
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
        text = "%s to rank %d: all processes stop after the same step and save; Ctrl-C again stops without saving."
        with contextlib.suppress(RuntimeError):  # a handler of signals interrupted a write to this stream
            logger.info(text, signal.Signals(request.signal).name, request.rank)
        return dispatched

    def _agree(self, step: int) -> None:
        with self._changed:
            self.request, self._last = self._asked, step
            self._changed.notify_all()
