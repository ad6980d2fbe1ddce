"""The watch of one process over the run: its connection to the coordinator, which hears of every other process.

A process that is killed shows at once, since its connection closes. One that is stopped or cut off shows by its
silence. Where the coordinator itself is gone, as with the host of rank 0, each process notices by itself.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from fiddlex.cluster.coordinator import ALIVE_S, PEER_TIMEOUT_S
from fiddlex.cluster.rendezvous import Membership, coordinators_end, kill_coordinator, read_messages, send

_POLL_S = 0.2


class StopRequest(NamedTuple):
    """Why all processes shall stop: the number of a signal, and the rank of the process that received it."""

    signal: int
    rank: int


class Peers:
    """The connection of this process to the coordinator.

    `lost` reports what a text names as lost, and ends this process; `leave` ends it with a status, without a message.
    """

    def __init__(self, membership: Membership, *, lost: Callable[[str], NoReturn], leave: Callable[[int], NoReturn]):
        self.timeout_s = PEER_TIMEOUT_S  # of silence, after which a process counts as lost
        self._membership, self._report_lost, self._leave = membership, lost, leave
        self._sending = threading.Lock()
        self._heard_s = time.monotonic()
        self._may_report, self._finished = threading.Event(), threading.Event()
        self._stopping = threading.Lock()
        self._stop_wanted: int | None = None  # the signal for which this process wants all to stop
        self._stop: StopRequest | None = None
        self._propose: Callable[[StopRequest], int] | None = None
        self._agree: Callable[[int], None] | None = None
        membership.connection.settimeout(None)
        for loop in (self._listen, self._say_alive):
            threading.Thread(target=loop, name=f"fiddlex{loop.__name__}", daemon=True).start()

    def set_timeout(self, seconds: float) -> None:
        """Tells the coordinator after how many seconds of silence any process counts as lost.

        This process waits as long for the coordinator. The coordinator uses the number that it was told last.
        """
        self.timeout_s = seconds
        self._send(peer_timeout=seconds)

    def fail(self, status: int, *, collective: bool) -> None:
        """Returns once this process may report its error, while all others end with `status`.

        Does not return where another process reports an error: the coordinator then ends this one. `collective` says
        whether the error is that of a collective, whose cause may be the loss of another process.
        """
        self._send(failed={"status": status, "collective": collective})
        self._may_report.wait()

    def finish(self, status: int) -> None:
        """Tells the coordinator that this process now ends with `status`, and that this is no failure of the run."""
        self._finished.set()
        self._send(finished=status)

    def request_stop(self, number: int) -> None:
        """Asks all processes to stop after the same step, because of signal `number`, whose handler may call this."""
        self._stop_wanted = number

    def follow_stop(self, propose: Callable[[StopRequest], int], agree: Callable[[int], None]) -> None:
        """Takes part in the agreement on the step after which all stop; another thread calls both functions.

        Args:
          propose: is called once a process has asked all to stop. Returns the last step that this process has
            dispatched, and from then on dispatches no other.
          agree: is called with the step after which all stop, the largest of the proposals.
        """
        with self._stopping:
            self._propose, self._agree = propose, agree
            if self._stop is not None:
                self._send(dispatched=propose(self._stop))

    def _asked_to_stop(self, request: StopRequest) -> None:
        with self._stopping:
            self._stop = request
            if self._propose is not None:
                self._send(dispatched=self._propose(request))

    def _send(self, **message: Any) -> None:
        with contextlib.suppress(OSError), self._sending:  # `_say_alive` notices a coordinator that is gone
            send(self._membership.connection, message)

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            for message in read_messages(self._membership.lines):
                self._heard_s = time.monotonic()
                ((name, value),) = message.items()
                if name == "report":
                    self._may_report.set()
                elif name == "end" and not self._finished.is_set():
                    self._leave(value)
                elif name == "lost":
                    self._report_lost(_described(value["processes"], value["silent_s"], self.timeout_s))
                elif name == "stop":
                    self._asked_to_stop(StopRequest(value["signal"], value["rank"]))
                elif name == "stop_after" and self._agree is not None:
                    self._agree(value)
        self._coordinator_gone("ended")

    def _say_alive(self) -> None:
        alive_s = 0.0
        while not self._finished.wait(_POLL_S):
            now = time.monotonic()
            if now - alive_s >= ALIVE_S:
                alive_s = now
                self._send(alive=True)
            if self._stop_wanted is not None:
                self._send(stop=self._stop_wanted)
                self._stop_wanted = None
            if now - self._heard_s > self.timeout_s:
                self._coordinator_gone(f"not heard of for {self.timeout_s:g} s (train.peer_timeout_s)")

    def _coordinator_gone(self, how: str) -> None:
        if not self._finished.is_set():
            how = coordinators_end() or how
            kill_coordinator()
            host = self._membership.service.rpartition(":")[0]
            self._report_lost(f"the coordinator of the run on the host of rank 0 ({host}), {how}")


def _described(processes: list[tuple[int, str]], silent_s: float | None, timeout_s: float) -> str:
    named = ", ".join(f"{rank} ({host})" for rank, host in processes)
    how = "its connection closed: it was killed, or its host is gone"
    if silent_s is not None:
        why = "train.peer_timeout_s" if silent_s == timeout_s else "after a failed exchange"
        how = f"not heard of for {silent_s:g} s ({why})"
    return f"rank {named}, {how}"
