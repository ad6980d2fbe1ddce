"""Processes meet at the coordinator; it says who is missing, wrong or lost."""

import concurrent.futures
import contextlib
import json
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any, TextIO

import pytest

from fiddlex.cluster import rendezvous
from fiddlex.cluster.coordinator import SUSPECTED_S
from fiddlex.cluster.rendezvous import Membership, meet, read_messages, send
from fiddlex.errors import ConfigError, DeviceError, Stopped
from fiddlex.terminal.interrupts import STOP_SIGNALS
from tests.cluster.pods import free_port

Joined = Membership | BaseException


def join(ranks: list[tuple[int, int]], *, timeout_s: float = 10, sizes: tuple[int, ...] = ()) -> list[Joined]:
    """How `meet` ended for processes, given as rank and number of processes, in threads."""
    address = f"localhost:{free_port()}"

    def one(rank: int, number: int) -> Joined:
        try:
            return meet(address, number, rank, timeout_s=timeout_s, sizes=sizes)
        except BaseException as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(len(ranks)) as pool:
        return [each.result() for each in [pool.submit(one, *each) for each in ranks]]


@contextlib.contextmanager
def met(number: int, **options: object) -> Iterator[dict[int, Membership]]:
    """The memberships of processes that have met, by rank."""
    members = join([(rank, number) for rank in range(number)], **options)  # type: ignore[arg-type]
    assert all(isinstance(each, Membership) for each in members), members
    try:
        yield {each.rank: each for each in members if isinstance(each, Membership)}
    finally:
        for each in members:
            close(each)


def close(member: Joined) -> None:
    """Ends a process as a kill would: the kernel closes its connection."""
    if isinstance(member, Membership):
        with contextlib.suppress(OSError):
            member.connection.shutdown(socket.SHUT_RDWR)
        member.lines.close()
        member.connection.close()


def connected(port: int) -> socket.socket:
    """A connection to a port of this host, as soon as somebody listens there."""
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(("localhost", port), timeout=1)


def told(member: Membership) -> dict[str, object]:
    """The next message of the coordinator that does not come by itself each second."""
    return next(message for message in read_messages(member.lines) if not message.keys() & {"alive", "missing"})


def test_all_start_once_all_have_joined() -> None:
    with met(4) as members:
        assert sorted(members) == [0, 1, 2, 3]
        assert {each.number for each in members.values()} == {4}
        assert len({each.service for each in members.values()}) == 1
        assert {each.missing for each in members.values()} == {()}


@pytest.mark.parametrize(
    ("ranks", "kind", "message"),
    [
        ([(0, 3), (1, 3)], DeviceError, r"2 of 3 processes have joined .* within 2 s, all but rank 2\. Start all"),
        ([(0, 3), (1, 3), (1, 3)], ConfigError, r"--process_id=1 was given to two processes, on .* and on rank 1 "),
        ([(0, 2), (1, 3)], ConfigError, r"--num_processes is 2 on rank 0 and 3 on rank 1 "),
        ([(0, 2), (5, 2)], ConfigError, r"--process_id=5 is not among the ranks 0 to 1 on rank 5 "),
    ],
)
def test_processes_that_are_missing_or_wrong(ranks: list[tuple[int, int]], kind: type, message: str) -> None:
    first, *others = join(ranks, timeout_s=2)
    with pytest.raises(kind, match=message):
        raise first  # type: ignore[misc]
    for other in others:  # only one process reports it; one that connected too late reached nobody
        assert isinstance(other, SystemExit | DeviceError), other
    assert any(isinstance(other, SystemExit) for other in others)


def test_a_second_process_of_a_rank_does_not_disturb_the_run() -> None:
    with met(2) as members:
        address = f"localhost:{members[1].connection.getpeername()[1]}"
        for rank in (0, 1):
            with pytest.raises(
                ConfigError, match=rf"--process_id={rank} was given to two processes, .* another run needs"
            ):
                meet(address, 2, rank, timeout_s=5)
        send(members[0].connection, {"stop": 15})
        assert told(members[1]) == {"stop": {"signal": 15, "rank": 0}}


def test_the_port_of_another_program() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(DeviceError, match=rf"process 0 cannot listen at port {port}: .*in use.* Choose a port"):
            meet(f"localhost:{port}", 2, 0, timeout_s=1)


@pytest.mark.parametrize(
    "text", [b"GET / HTTP/1.1\r\n\r\n", b'{"a": 1}\n', b'{"join": 1}\n', b"\xff\n", b"[]\n", b"[" * 60000 + b"\n", b""]
)
def test_strangers_at_the_port_change_nothing(text: bytes) -> None:
    port = free_port()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first = pool.submit(meet, f"localhost:{port}", 2, 0, timeout_s=10)
        with connected(port) as stranger:
            stranger.sendall(text)
        second = pool.submit(meet, f"localhost:{port}", 2, 1, timeout_s=10)
        members = [first.result(), second.result()]
    with socket.create_connection(("localhost", port), timeout=1) as stranger:
        stranger.sendall(text)
    send(members[0].connection, {"stop": 2})
    assert told(members[1]) == {"stop": {"signal": 2, "rank": 0}}
    for each in members:
        close(each)


def test_no_attempt_to_connect_lasts_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """TCP tries a host that does not answer ever less often, so it would notice late that the host is back."""

    def connect(place: tuple[str, int], *, timeout: float) -> socket.socket:
        raise RuntimeError(f"{place}, {timeout:g} s")

    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(RuntimeError, match=r"\('far', 7\), 10 s"):
        meet("far:7", 2, 1, timeout_s=300)


def test_fewer_processes_start_under_new_ranks_where_that_is_allowed() -> None:
    members = join([(0, 4), (2, 4), (3, 4)], timeout_s=2, sizes=(3,))
    assert [(each.rank, each.number, each.missing) for each in members if isinstance(each, Membership)] == [
        (0, 3, (1,)),
        (1, 3, (1,)),
        (2, 3, (1,)),
    ]
    for each in members:
        close(each)


def test_a_process_that_has_no_place_waits_for_the_end_and_joins_again() -> None:
    address = f"localhost:{free_port()}"
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        runs = [pool.submit(meet, address, 4, rank, timeout_s=2, sizes=(2,)) for rank in (0, 1, 3)]
        first, second = runs[0].result(), runs[1].result()
        assert not runs[2].done()
        close(second)  # the run ends; the third joins again, with all others
        assert told(first)["lost"]
        close(first)
        again = [pool.submit(meet, address, 4, rank, timeout_s=20) for rank in (0, 1, 2)]
        members = [each.result() for each in [*again, runs[2]]]
    assert [each.rank for each in members] == [0, 1, 2, 3]
    for each in members:
        close(each)


def test_a_host_that_comes_back_waits_though_others_have_new_ranks() -> None:
    address = f"localhost:{free_port()}"
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        runs = [pool.submit(meet, address, 3, rank, timeout_s=1, sizes=(2,)) for rank in (0, 2)]
        members = [each.result() for each in runs]
        assert [each.rank for each in members] == [0, 1]
        back = pool.submit(meet, address, 3, 1, timeout_s=20)
        with pytest.raises(ConfigError, match="--process_id=2 was given to two processes"):
            meet(address, 3, 2, timeout_s=5)
        assert not back.done()
        for each in members:
            close(each)
        again = [pool.submit(meet, address, 3, rank, timeout_s=20) for rank in (0, 2)]
        members = [each.result() for each in [*again, back]]
    assert [each.rank for each in members] == [0, 2, 1]
    for each in members:
        close(each)


@pytest.mark.parametrize("number", [2, 3], ids=["during the run", "during the meeting"])
def test_a_host_that_was_cut_off_comes_back_before_it_counts_as_lost(number: int) -> None:
    """The coordinator learns of no end of its first connection."""
    port = free_port()
    address = f"localhost:{port}"
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        members = [pool.submit(meet, address, number, 0, timeout_s=20)]
        with connected(port) as cut_off:
            cut_off.settimeout(20)
            send(cut_off, {"join": {"rank": 1, "number": number, "host": "far"}})
            assert cut_off.recv(1)
            time.sleep(SUSPECTED_S + 0.5)
            members.append(pool.submit(meet, address, number, 1, timeout_s=20))
            time.sleep(0.5)
            assert not members[1].done()
        if number == 2:
            assert told(members[0].result())["lost"]
            close(members[0].result())
            members[0] = pool.submit(meet, address, number, 0, timeout_s=20)
        else:
            members.append(pool.submit(meet, address, number, 2, timeout_s=20))
        assert [each.result().rank for each in members] == [*range(number)]
    for each in members:
        close(each.result())


@pytest.mark.parametrize("status", [0, 143])
def test_a_process_that_waits_ends_with_a_run_that_is_done(status: int) -> None:
    address = f"localhost:{free_port()}"
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        runs = [pool.submit(meet, address, 3, rank, timeout_s=1, sizes=(1,)) for rank in (0, 1)]
        only = runs[0].result()
        send(only.connection, {"finished": status})
        close(only)
        expected = "^0$" if status == 0 else "did not reach"
        with pytest.raises((SystemExit, DeviceError), match=expected):
            runs[1].result()


def test_a_lost_process_is_reported_by_one_of_the_others() -> None:
    with met(3) as members:
        lost_s = time.monotonic()
        close(members[0])
        said = told(members[1])
        assert said == {"lost": {"processes": [[0, socket.gethostname()]], "silent_s": None}}
        assert told(members[2]) == {"end": 1}
        assert time.monotonic() - lost_s < 2


def test_the_coordinator_outlives_signals_that_ask_a_run_to_save() -> None:
    """Slurm may send them to all processes of a job."""
    with met(2) as members:
        for number in STOP_SIGNALS:
            rendezvous._started[-1].process.send_signal(number)
        send(members[0].connection, {"stop": signal.SIGTERM})
        assert told(members[1]) == {"stop": {"signal": signal.SIGTERM, "rank": 0}}


def test_a_silent_process_is_lost_and_one_that_has_finished_is_not() -> None:
    with met(3) as members:
        send(members[0].connection, {"peer_timeout": 2})
        send(members[2].connection, {"finished": 0})
        close(members[2])
        for _ in range(6):
            send(members[0].connection, {"alive": True})
            time.sleep(0.5)
        said = told(members[0])
        assert said == {"lost": {"processes": [[1, socket.gethostname()]], "silent_s": 2}}


def test_one_process_reports_its_error_and_the_others_end_with_its_status() -> None:
    with met(3) as members:
        send(members[2].connection, {"failed": {"status": 2, "collective": False}})
        assert told(members[2]) == {"report": True}
        send(members[1].connection, {"failed": {"status": 1, "collective": False}})
        assert told(members[0]) == told(members[1]) == {"end": 2}


def test_a_failed_collective_waits_for_signs_of_life_of_all() -> None:
    with met(2) as members:
        send(members[0].connection, {"failed": {"status": 1, "collective": True}})
        asked_s = time.monotonic()
        while time.monotonic() < asked_s + 1.5:
            for each in members.values():
                send(each.connection, {"alive": True})
            time.sleep(0.2)
        assert told(members[0]) == {"report": True}
        assert told(members[1]) == {"end": 1}
    with met(2) as members:
        send(members[0].connection, {"failed": {"status": 1, "collective": True}})
        time.sleep(0.3)  # an answer to the failure alone would be another
        close(members[1])
        assert "lost" in told(members[0])


def test_all_agree_on_the_step_to_stop_after() -> None:
    with met(3) as members:
        send(members[1].connection, {"stop": 15})
        assert [told(members[rank]) for rank in range(3)] == [{"stop": {"signal": 15, "rank": 1}}] * 3
        for rank, step in enumerate((4, 7, 5)):
            send(members[rank].connection, {"dispatched": step})
            time.sleep(0.2)  # an answer to the first alone would be another
        assert [told(members[rank]) for rank in range(3)] == [{"stop_after": 7}] * 3


def test_messages_are_lines_of_json() -> None:
    with met(2) as members:
        members[0].connection.sendall(json.dumps({"stop": 15}).encode()[:5])
        time.sleep(0.3)
        members[0].connection.sendall(json.dumps({"stop": 15}).encode()[5:] + b"\n")
        assert told(members[1]) == {"stop": {"signal": 15, "rank": 0}}


def test_a_signal_during_the_meeting_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(lines: TextIO) -> Iterator[dict[str, object]]:
        if threading.current_thread().name.endswith("_1"):  # of rank 1
            raise Stopped(15)
        return read_messages(lines)

    monkeypatch.setattr(rendezvous, "read_messages", stopped)
    ended = join([(0, 3), (1, 3)], timeout_s=60)
    assert [isinstance(each, SystemExit) and each.code for each in ended] == [143, 143]


@pytest.mark.long
def test_connections_that_do_not_join_are_closed() -> None:
    with met(2) as members:
        port = members[1].connection.getpeername()[1]
        strangers = [socket.create_connection(("localhost", port), timeout=30) for _ in range(20)]
        for stranger in strangers:
            assert stranger.recv(1) == b""  # closed, after 10 s
            stranger.close()
        send(members[0].connection, {"stop": 15})
        for each in members.values():  # the run has nothing of it
            assert told(each) == {"stop": {"signal": 15, "rank": 0}}


def test_a_coordinator_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    script = "raise OSError(28, 'No space left on device')"
    original = subprocess.Popen

    def broken(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return original([command[0], "-c", script], **options)

    monkeypatch.setattr(subprocess, "Popen", broken)
    with pytest.raises(
        DeviceError, match=r"which process 0 started, ended with status 1:(.|\n)*No space left on device"
    ):
        meet(f"localhost:{free_port()}", 2, 0, timeout_s=20)
