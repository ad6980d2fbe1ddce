"""The processes of a run agree on the step after which all of them stop, when one of them is asked to.

A process must not stop while another one waits for it in a collective. So each one proposes the last step that it has
dispatched, dispatches no other until all have proposed, and all stop after the largest proposal. The coordinator
collects the proposals; a thread makes that of this process, since the main thread may be waiting for the devices.
"""

import threading

from fiddlex.cluster.peers import Peers


class AgreedStop:
    """What the processes have agreed on.

    Args:
      peers: the connection to the other processes; None in a run of one process.

    Attributes:
      reason: the number that the first `request` of any process gave; None before all have agreed.
    """

    def __init__(self, peers: Peers | None):
        self.reason: int | None = None
        self._peers = peers
        self._changed = threading.Condition()
        self._dispatched = 0
        self._asked: int | None = None  # the reason, once all have been asked to stop
        self._last: int | None = None
        if peers is not None:
            peers.follow_stop(self._propose, self._agree)

    def request(self, reason: int) -> None:
        """Asks all processes to stop; a handler of signals may call it."""
        if self._peers is None:
            self.reason = reason
        else:
            self._peers.request_stop(reason)

    def goes_on(self, step: int) -> bool:
        """Whether to dispatch the step after `step`; waits while the processes agree on it."""
        if self._peers is None:
            return self.reason is None
        with self._changed:
            self._changed.wait_for(lambda: self._asked is None or self._last is not None)
            if self._last is not None and step >= self._last:
                return False
            self._dispatched = step + 1
            return True

    def _propose(self, reason: int) -> int:
        """The last step that this process has dispatched; from now on it waits for the agreement."""
        with self._changed:
            self._asked = reason
            return self._dispatched

    def _agree(self, step: int) -> None:
        with self._changed:
            self.reason, self._last = self._asked, step
            self._changed.notify_all()
