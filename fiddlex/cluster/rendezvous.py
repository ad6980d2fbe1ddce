"""Where the processes of a run meet: the coordinator's port, on the host of rank 0.

Rank 0 starts the coordinator (`fiddlex.cluster.coordinator`), and all ranks connect to it. A process that joins while
an earlier start of the run is still ending waits for that end, and joins again; so does one that the run goes on
without.
"""

import contextlib
import errno
import json
import logging
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import IO, Any, NamedTuple, TextIO

from fiddlex.cluster import coordinator
from fiddlex.cluster.addresses import own_address
from fiddlex.errors import ConfigError, DeviceError, Stopped

logger = logging.getLogger(__name__)

_RETRY_S = 0.2
_PATIENCE_S = 10.0  # of waiting, after which rank 0 logs which processes are missing
_SILENT_S = 10.0  # seconds in which a coordinator that lives says something
_PORT_S = 3.0  # seconds in which a port that is in use may become free
_ENDING_S = 1.0  # seconds in which a coordinator ends once its connection has closed
_MISUSED = 2  # the status of a mistake on the command line
_ERROR_LINES = 5  # that a message shows of what a coordinator wrote before it failed


class _Started(NamedTuple):
    """A coordinator that this process has started, and the file that its standard error goes to."""

    process: subprocess.Popen[bytes]
    errors: IO[bytes]


_started: list[_Started] = []  # the last one is that of the present run


class Membership(NamedTuple):
    """The place of this process in the run.

    Attributes:
      rank: its rank.
      number: how many processes the run has.
      service: HOST:PORT of jax's coordination service.
      connection: the connection to the coordinator.
      lines: what the coordinator sends.
      address: by which other processes reach this one.
      missing: the ranks that did not join, and that the run goes on without.
    """

    rank: int
    number: int
    service: str
    connection: socket.socket
    lines: TextIO
    address: str
    missing: tuple[int, ...] = ()


def meet(address: str, number: int, rank: int, *, timeout_s: float, sizes: Sequence[int] = ()) -> Membership:
    """Returns once all processes have joined, or fewer where `sizes` allows it.

    Args:
      address: HOST:PORT of the coordinator, on the host of rank 0, with a port above 0.
      number: how many processes the run has.
      rank: the rank of this one.
      timeout_s: seconds to wait. A process that the run goes on without waits until that run ends.
      sizes: smaller numbers of processes that the run can go on with once `timeout_s` is over.

    Raises:
      ConfigError: when two processes have one rank, or say different numbers of processes.
      DeviceError: when the port is in use, nobody listens at the address, too few join in time, or the
        coordinator fails.
      SystemExit: when another process reports the error that ends the meeting, with the status of that error; and with
        status 0 when this process was waiting for its place in a run that is now done.
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
                wait_s = min(deadline - time.monotonic(), _SILENT_S)  # TCP itself would try ever less often
                connection = socket.create_connection(place, timeout=max(wait_s, 0.001))
                send(connection, {"join": {"rank": rank, "number": number, "host": socket.gethostname()}})
            answer = _answered(connection, place[0], rank)
        except OSError as error:
            reason = error.strerror or str(error)
            time.sleep(_RETRY_S)
            continue
        if answer.membership is not None:
            return answer.membership
        if answer.waited:  # the run that it waited for has ended
            deadline = time.monotonic() + timeout_s
        elif end := coordinators_end():
            raise DeviceError(f"The coordinator of the run, which process 0 started, {end}")
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
        send(found, {"ping": True})
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
    errors = tempfile.TemporaryFile()  # noqa: SIM115 — open as long as the coordinator runs
    with first:
        process = subprocess.Popen(
            [sys.executable, "-P", coordinator.__file__, json.dumps(arguments)],
            pass_fds=[server.fileno(), first.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )
    _started.append(_Started(process, errors))
    return connection


def coordinators_end() -> str:
    """How the coordinator that this process has started ended, and the last lines that it wrote.

    Returns:
      A text such as 'killed by SIGKILL'; empty where it still runs, or another process has started it.
    """
    if not _started:
        return ""
    process, errors = _started[-1]
    try:
        status = process.wait(_ENDING_S)  # its connection closes shortly before it has ended
    except subprocess.TimeoutExpired:
        return ""
    end = f"killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    errors.seek(0)
    lines = errors.read().decode("utf-8", "replace").strip().splitlines()[-_ERROR_LINES:]
    return ":\n  ".join([end, "\n  ".join(lines)]) if lines else end


def leave_coordinator() -> None:
    """Lets a coordinator that this process has started outlive it; Python would warn of a process that still runs."""
    for started in _started:
        started.errors.close()
        started.process.returncode = 0


def kill_coordinator() -> None:
    """Kills the coordinator if this process has started it; one that is stopped would keep its port for ever."""
    for started in _started:
        started.process.kill()


class _Answer(NamedTuple):
    """How the coordinator let this process in, or closed the connection.

    Attributes:
      membership: the place of this process; None when the connection was closed.
      waited: whether the coordinator had told this process to wait for the end of the present run.
    """

    membership: Membership | None
    waited: bool


def _answered(connection: socket.socket, host: str, rank: int) -> _Answer:
    """What the coordinator at `host` answers to the process that has joined as `rank`."""
    waits, told = False, False
    joined_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        stack.enter_context(connection)
        connection.settimeout(_SILENT_S)
        lines = stack.enter_context(connection.makefile("r", encoding="utf-8"))
        try:
            for message in read_messages(lines):
                if "alive" in message:
                    send(connection, {"alive": True})
                if "start" in message:
                    start = message["start"]
                    stack.pop_all()
                    service = f"[{host}]:{start['port']}" if ":" in host else f"{host}:{start['port']}"
                    own, missing = own_address(connection, start["address"]), tuple(start["missing"])
                    place = Membership(start["rank"], start["number"], service, connection, lines, own, missing)
                    return _Answer(place, waits)
                if "refused" in message:
                    status, text = message["refused"]["status"], message["refused"]["text"]
                    raise ConfigError(text) if status == _MISUSED else DeviceError(text)
                if "end" in message:
                    sys.exit(message["end"])
                if "missing" in message and not told and time.monotonic() - joined_s > _PATIENCE_S:
                    told, missing = True, message["missing"]
                    text = "waiting for rank %s to join, for %.0f s more (--join_timeout_s)"
                    logger.info(text, missing["ranks"], missing["seconds_left"])
                if "wait" in message and not waits:
                    waits = True
                    logger.info("rank %d waits: the run has no place for it until its next start", rank)
        except Stopped as stopped:
            send(connection, {"stop": stopped.signal})
            raise
    return _Answer(None, waits)


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
