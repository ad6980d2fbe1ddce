"""Processes meet at a port; those that are missing or wrong are told on the first one."""

import concurrent.futures
import socket

import pytest

from fiddlex.cluster.rendezvous import meet
from fiddlex.errors import ConfigError, DeviceError
from tests.cluster.pods import free_port


def come(ranks: list[tuple[int, int]], *, timeout_s: float = 5) -> list[BaseException | None]:
    """How `meet` ended for processes, given as rank and number of processes, in threads."""
    address = f"localhost:{free_port()}"
    with concurrent.futures.ThreadPoolExecutor(len(ranks)) as pool:
        running = [pool.submit(meet, address, number, rank, timeout_s=timeout_s) for rank, number in ranks]
        return [each.exception() for each in running]


def test_all_go_on_once_all_have_come() -> None:
    assert come([(3, 4), (1, 4), (0, 4), (2, 4)]) == [None] * 4
    assert come([(0, 1)]) == [None]


@pytest.mark.parametrize(
    ("ranks", "kind", "message"),
    [
        ([(0, 3), (1, 3)], DeviceError, r"2 of 3 processes have come .* within 2 s, all but rank 2\. Start all"),
        ([(0, 3), (1, 3), (1, 3)], ConfigError, r"--process_id=1 was given to two processes, the second on "),
        ([(0, 2), (1, 3)], ConfigError, r"--num_processes is 2 on rank 0 and 3 on rank 1 "),
    ],
)
def test_the_first_process_tells_what_is_wrong_and_the_others_end(
    ranks: list[tuple[int, int]], kind: type[Exception], message: str
) -> None:
    first, *others = come(ranks, timeout_s=2)
    assert isinstance(first, kind)
    with pytest.raises(kind, match=message):
        raise first
    assert all(isinstance(other, SystemExit | DeviceError) for other in others)
    assert sum(isinstance(other, SystemExit) for other in others) >= 1


def test_a_port_in_use_is_told() -> None:
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        port = server.getsockname()[1]
        with pytest.raises(DeviceError, match=rf"process 0 cannot listen at port {port}: .*in use.* Choose a port"):
            meet(f"localhost:{port}", 2, 0, timeout_s=1)


@pytest.mark.parametrize("text", [b"GET / HTTP/1.1\r\n\r\n", b'{"a": 1}\n', b"\xff\n", b""])
def test_strangers_at_the_port_change_nothing(text: bytes) -> None:
    address, port = "localhost", free_port()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first = pool.submit(meet, f"{address}:{port}", 2, 0, timeout_s=10)
        while True:
            try:
                with socket.create_connection((address, port), timeout=1) as stranger:
                    stranger.sendall(text)
                break
            except ConnectionRefusedError:
                continue
        second = pool.submit(meet, f"{address}:{port}", 2, 1, timeout_s=10)
        assert first.exception() is second.exception() is None
