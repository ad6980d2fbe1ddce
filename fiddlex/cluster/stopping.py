"""The processes of a run agree on the step after which all of them stop, when one of them is asked to.

A process must not stop while another one waits for it in a collective. So each one proposes the last step that it has
dispatched, dispatches no other until all have proposed, and all stop after the largest proposal. A thread proposes,
since the main thread may be waiting for the devices.
"""

import contextlib
import threading
from typing import Any

_STOP, _PROPOSED = "fiddlex/stop", "fiddlex/stop_after"
_POLL_S = 0.2


class AgreedStop:
    """What the processes have agreed on.

    Args:
      client: the client of jax's coordination service; None in a run of one process.
      rank: this process's rank.
      num_processes: how many there are.

    Attributes:
      reason: the number that the first `request` of any process gave; None before one is known.
    """

    def __init__(self, client: Any, rank: int, num_processes: int):
        self.reason: int | None = None
        self._client, self._rank, self._number = client, rank, num_processes
        self._requested: int | None = None
        self._changed = threading.Condition()
        self._dispatched, self._proposed = 0, False
        self._last: int | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._agree, name="fiddlex-stop", daemon=True)
        if client is not None:
            self._thread.start()

    def request(self, reason: int) -> None:
        """Asks all processes to stop; a handler of signals may call it."""
        self._requested = reason
        if self._client is None:
            self.reason = reason

    def goes_on(self, step: int) -> bool:
        """Whether to dispatch the step after `step`; waits while the processes agree on it."""
        if self._client is None:
            return self.reason is None
        with self._changed:
            self._changed.wait_for(lambda: not self._proposed or self._last is not None)
            if self._last is not None and step >= self._last:
                return False
            self._dispatched = step + 1
            return True

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def _agree(self) -> None:
        while not self._closed.wait(_POLL_S):
            with contextlib.suppress(Exception):  # no request yet, or a process is lost, which `Peers` tells
                if self._requested is not None:
                    self._client.key_value_set(_STOP, str(self._requested), allow_overwrite=True)
                reason = int(self._client.key_value_try_get(_STOP))
                with self._changed:
                    self._proposed = True
                self._client.key_value_set(f"{_PROPOSED}/{self._rank}", str(self._dispatched), allow_overwrite=True)
                said = [int(step) for _, step in self._client.key_value_dir_get(_PROPOSED)]
                if len(said) < self._number:
                    continue
                with self._changed:
                    self.reason, self._last = reason, max(said)
                    self._changed.notify_all()
                return
