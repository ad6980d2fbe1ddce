"""The watch of one process over the run: its connection to the coordinator, which hears of every other process.

A process that is killed shows at once, since its connection closes. One that is stopped or cut off shows by its
silence. Where the coordinator itself is gone, as with the host of rank 0, each process notices by itself.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from fiddlex.cluster.coordinator import BEAT_S, PEER_TIMEOUT_S
from fiddlex.cluster.rendezvous import Membership, end_coordinator, read_messages, send

_POLL_S = 0.2


class Peers:
    """The connection of this process to the coordinator.

    Args:
      membership: the place of this process in the run.
      lost: says that the ranks of a text are lost, and ends this process.
      leave: ends this process with a status, without a message.

    Attributes:
      timeout_s: seconds of silence after which a process counts as lost.
    """

    def __init__(self, membership: Membership, *, lost: Callable[[str], NoReturn], leave: Callable[[int], NoReturn]):
        self.timeout_s = PEER_TIMEOUT_S
        self._membership, self._say_lost, self._leave = membership, lost, leave
        self._sending = threading.Lock()
        self._heard_s = time.monotonic()
        self._may_speak, self._left = threading.Event(), threading.Event()
        self._stopping = threading.Lock()
        self._stop_wanted: int | None = None  # by this process
        self._stop: int | None = None  # the reason for which all are asked to stop
        self._propose: Callable[[int], int] | None = None
        self._agree: Callable[[int], None] | None = None
        membership.connection.settimeout(None)
        for loop in (self._listen, self._beat):
            threading.Thread(target=loop, name=f"fiddlex{loop.__name__}", daemon=True).start()

    def set_timeout(self, seconds: float) -> None:
        """Makes every process of the run count as lost after `seconds` of silence."""
        self.timeout_s = seconds
        self._send(timeout=seconds)

    def fail(self, status: int, *, collective: bool) -> None:
        """Returns once this process may say its error, while all others end; ends it where another one says one.

        Args:
          status: the status that all processes shall end with.
          collective: whether the error is that of a collective, whose cause may be the loss of another process.
        """
        self._send(failed={"status": status, "collective": collective})
        self._may_speak.wait()

    def leave(self, status: int) -> None:
        """Says goodbye: this process will end with `status`, and that is no failure of the run."""
        self._left.set()
        self._send(left=status)

    def request_stop(self, reason: int) -> None:
        """Asks all processes to stop after one and the same step; a handler of signals may call it."""
        self._stop_wanted = reason

    def follow_stop(self, propose: Callable[[int], int], agree: Callable[[int], None]) -> None:
        """Takes part in the agreement on the last step.

        Args:
          propose: is called in another thread once a process has asked all to stop, with its reason; returns the last
            step that this process has dispatched.
          agree: is called there with the step after which all stop.
        """
        with self._stopping:
            self._propose, self._agree = propose, agree
            if self._stop is not None:
                self._send(dispatched=propose(self._stop))

    def _asked_to_stop(self, reason: int) -> None:
        with self._stopping:
            self._stop = reason
            if self._propose is not None:
                self._send(dispatched=self._propose(reason))

    def _send(self, **message: Any) -> None:
        with contextlib.suppress(OSError), self._sending:  # `_beat` notices a coordinator that is gone
            send(self._membership.connection, message)

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            for message in read_messages(self._membership.lines):
                self._heard_s = time.monotonic()
                ((name, value),) = message.items()
                if name == "speak":
                    self._may_speak.set()
                elif name == "end" and not self._left.is_set():
                    self._leave(value)
                elif name == "lost":
                    self._say_lost(_described(value["processes"], value["silent_s"]))
                elif name == "stop":
                    self._asked_to_stop(value)
                elif name == "stop_after" and self._agree is not None:
                    self._agree(value)
        self._coordinator_gone("ended")

    def _beat(self) -> None:
        beaten_s = 0.0
        while not self._left.wait(_POLL_S):
            now = time.monotonic()
            if now - beaten_s >= BEAT_S:
                beaten_s = now
                self._send(alive=True)
            if self._stop_wanted is not None:
                self._send(stop=self._stop_wanted)
                self._stop_wanted = None
            if now - self._heard_s > self.timeout_s:
                self._coordinator_gone(f"not heard of for {self.timeout_s:g} s (train.peer_timeout_s)")

    def _coordinator_gone(self, how: str) -> None:
        if not self._left.is_set():
            end_coordinator()
            host = self._membership.service.rpartition(":")[0]
            self._say_lost(f"the coordinator of the run on the host of rank 0 ({host}), {how}")


def _described(processes: list[tuple[int, str]], silent_s: float | None) -> str:
    named = ", ".join(f"{rank} ({host})" for rank, host in processes)
    how = "its connection closed: it was killed, or its host is gone"
    if silent_s is not None:
        how = f"not heard of for {silent_s:g} s (train.peer_timeout_s)"
    return f"rank {named}, {how}"
