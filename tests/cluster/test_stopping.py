"""Processes agree on the step after which all stop, or end at once when none has dispatched a step."""

import sys
import threading

import pytest

from fiddlex.cluster.peers import StopRequest
from fiddlex.cluster.stopping import AgreedStop

REQUEST = StopRequest(signal=15, rank=1)


class FakePeers:
    """Keeps what the processes would be told."""

    def __init__(self) -> None:
        self.finished: int | None = None

    def follow_stop(self, propose: object, agree: object) -> None:
        pass

    def finish(self, status: int) -> None:
        self.finished = status


def make() -> tuple[AgreedStop, FakePeers]:
    peers = FakePeers()
    return AgreedStop(peers, sys.exit), peers  # type: ignore[arg-type]


def test_a_process_catches_up_with_the_largest_proposal() -> None:
    stop, _ = make()
    assert stop.goes_on(4)
    assert stop._propose(REQUEST) == 5
    dispatched = []

    def dispatch() -> None:
        step = 5
        while stop.goes_on(step):
            step += 1
            dispatched.append(step)

    thread = threading.Thread(target=dispatch)
    thread.start()
    thread.join(timeout=0.3)
    assert thread.is_alive()  # it waits for the agreement
    assert stop.request is None
    stop._agree(7)
    thread.join(timeout=10)
    assert dispatched == [6, 7]
    assert stop.request == REQUEST


def test_before_the_first_step_of_all_processes_they_end_at_once() -> None:
    stop, peers = make()
    assert stop._propose(REQUEST) == 0
    with pytest.raises(SystemExit, match=r"^143$"):
        stop._agree(0)
    assert peers.finished == 143
