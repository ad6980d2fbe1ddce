"""Where the processes of a run meet: the coordinator's port, on the host of rank 0.

Rank 0 starts the coordinator (`fiddlex.cluster.coordinator`), and all ranks connect to it. A process that comes while
an earlier start of the run is still ending waits for that end, and comes again; so does one that the run goes on
without.
"""

import contextlib
import errno
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TextIO

from fiddlex.cluster import coordinator
from fiddlex.errors import ConfigError, DeviceError

_RETRY_S = 0.2
_SILENT_S = 10.0  # seconds in which a coordinator that lives says something
_PORT_S = 3.0  # seconds in which a port that is in use may become free
_MISUSED = 2  # the status of a mistake on the command line
_coordinators: list[subprocess.Popen[bytes]] = []  # that this process has started; they end after it


class Membership(NamedTuple):
    """The place of this process in the run.

    Attributes:
      rank: its rank.
      number: how many processes the run has.
      service: HOST:PORT of jax's coordination service.
      connection: the connection to the coordinator.
      lines: what the coordinator sends.
      missing: the ranks that did not come, and that the run goes on without.
    """

    rank: int
    number: int
    service: str
    connection: socket.socket
    lines: TextIO
    missing: tuple[int, ...] = ()


def meet(address: str, number: int, rank: int, *, timeout_s: float, sizes: Sequence[int] = ()) -> Membership:
    """Returns once all processes have come, or fewer where `sizes` allows it.

    Args:
      address: HOST:PORT of the coordinator, on the host of rank 0, with a port above 0.
      number: how many processes the run has.
      rank: the rank of this one.
      timeout_s: seconds to wait. A process that the run goes on without waits until that run ends.
      sizes: smaller numbers of processes that the run can go on with once `timeout_s` is over.

    Raises:
      ConfigError: when two processes have one rank, or say different numbers of processes.
      DeviceError: when the port is in use, nobody listens at the address, or too few come in time.
      SystemExit: on the other processes, when one has raised an error, which it tells for all.
    """
    host, _, text = address.rpartition(":")
    place = host.strip("[]"), int(text)
    deadline, reason = time.monotonic() + timeout_s, "no answer"
    while time.monotonic() < deadline:
        try:
            server = _listen(address, place[1]) if rank == 0 else None
            if server is not None:
                with server:
                    connection = _start(server, address, number, timeout_s=timeout_s, sizes=sizes)
            else:
                connection = socket.create_connection(place, timeout=max(deadline - time.monotonic(), 0.001))
                send(connection, {"come": {"rank": rank, "number": number, "host": socket.gethostname()}})
            found, waited = _answered(connection, place[0])
        except OSError as error:
            reason = error.strerror or str(error)
            time.sleep(_RETRY_S)
            continue
        if found is not None:
            return found
        if waited:  # the run that it waited for has ended
            deadline = time.monotonic() + timeout_s
        time.sleep(_RETRY_S)
    raise DeviceError(
        f"Process {rank} of {number} did not reach --coordinator_address={address} within {timeout_s:g} s: {reason}. "
        "Check the address, and that process 0 runs there."
    )


def _listen(address: str, port: int) -> socket.socket | None:
    """A socket that listens at the port; None where a coordinator has it, as of an earlier start of this run."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    deadline = time.monotonic() + _PORT_S
    while True:
        try:
            return socket.create_server(
                ("", port), family=family, dualstack_ipv6=family == socket.AF_INET6, backlog=1024
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE and _is_coordinator(port):
                return None
            if error.errno == errno.EADDRINUSE and time.monotonic() < deadline:
                time.sleep(_RETRY_S)  # a coordinator may just be ending
                continue
            raise DeviceError(
                f"--coordinator_address={address}: process 0 cannot listen at port {port}: {error.strerror}. Choose a "
                "port that is free on its host."
            ) from error


def _is_coordinator(port: int) -> bool:
    """Whether a coordinator of fiddlex listens at a port of this host."""
    with contextlib.suppress(OSError, ValueError), socket.create_connection(("localhost", port), timeout=3) as found:
        send(found, {"who": True})
        return isinstance(json.loads(found.makefile("r", encoding="utf-8").readline(coordinator.LINE_BYTES)), dict)
    return False


def _start(
    server: socket.socket, address: str, number: int, *, timeout_s: float, sizes: Sequence[int]
) -> socket.socket:
    """Starts the coordinator in a session of its own, so that no signal to this process's group reaches it.

    Returns:
      The connection of rank 0 to the coordinator.
    """
    connection, first = socket.socketpair()
    arguments = {"address": address, "number": number, "timeout_s": timeout_s, "sizes": list(sizes)}
    arguments |= {"server": server.fileno(), "first": first.fileno()}
    with first:
        started = subprocess.Popen(
            [sys.executable, "-P", coordinator.__file__, json.dumps(arguments)],
            pass_fds=[server.fileno(), first.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    _coordinators.append(started)
    return connection


def end_coordinator() -> None:
    """Kills the coordinator if this process has started it; one that is stopped would keep its port for ever."""
    for started in _coordinators:
        started.kill()


def _answered(connection: socket.socket, host: str) -> tuple[Membership | None, bool]:
    """What the coordinator answers: the membership or None, and whether it has let this process wait until its end."""
    waits = False
    with contextlib.ExitStack() as stack:
        stack.enter_context(connection)
        connection.settimeout(_SILENT_S)
        lines = stack.enter_context(connection.makefile("r", encoding="utf-8"))
        for message in read_messages(lines):
            if "go" in message:
                go = message["go"]
                stack.pop_all()
                service = f"[{host}]:{go['port']}" if ":" in host else f"{host}:{go['port']}"
                missing = tuple(go["missing"])
                return Membership(go["rank"], go["number"], service, connection, lines, missing), False
            if "refused" in message:
                status, text = message["refused"]["status"], message["refused"]["text"]
                raise ConfigError(text) if status == _MISUSED else DeviceError(text)
            if "end" in message:
                sys.exit(message["end"])
            waits = waits or "wait" in message
    return None, waits


def read_messages(lines: TextIO) -> Iterator[dict[str, Any]]:
    """The messages of a coordinator, until its end."""
    while line := lines.readline(coordinator.LINE_BYTES):
        try:
            message = json.loads(line)
        except ValueError:
            return  # no coordinator
        if isinstance(message, dict):
            yield message


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Sends one message."""
    connection.sendall(json.dumps(message).encode() + b"\n")
