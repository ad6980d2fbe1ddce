"""Where the processes of a run meet: the coordinator's port, on the host of rank 0.

Rank 0 starts the coordinator (`fiddlex.cluster.coordinator`), and all ranks connect to it. A process that joins while
an earlier start of the run is still ending waits for that end, and joins again; so does one that the run goes on
without.
"""

import contextlib
import errno
import json
import logging
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
from fiddlex.terminal.readable import signal_name

logger = logging.getLogger(__name__)

_RETRY_S = 0.2
_PATIENCE_S = 10.0  # of waiting, after which rank 0 logs which processes are missing
_SILENT_S = 10.0  # seconds in which a coordinator that lives says something
_PORT_S = 3.0  # seconds in which a port that is in use may become free
_ENDING_S = 1.0  # seconds in which a coordinator ends once its connection has closed
_MISUSED = 2  # the status of a mistake on the command line
_ERROR_LINES = 5  # that a message shows of what a coordinator wrote before it failed


class _Started(NamedTuple):
    process: subprocess.Popen[bytes]
    errors: IO[bytes]  # the file that the coordinator's standard error goes to


_started: list[_Started] = []  # the last one is that of the present run


class Membership(NamedTuple):
    """The place of this process in the run."""

    rank: int
    number: int  # of processes in the run
    service: str  # HOST:PORT of jax's coordination service
    connection: socket.socket  # to the coordinator
    lines: TextIO  # what the coordinator sends
    address: str  # by which other processes reach this one
    missing: tuple[int, ...] = ()  # the ranks that did not join, and that the run goes on without


def meet(address: str, number: int, rank: int, *, timeout_s: float, sizes: Sequence[int] = ()) -> Membership:
    """Returns once all processes have joined, or fewer where `sizes` allows it.

    `address` is HOST:PORT of the coordinator, on the host of rank 0, with a port above 0. Once `timeout_s` is over, the
    run can go on with one of the `sizes`; a process that it goes on without waits until that run ends.

    Raises:
      ConfigError: when two processes have one rank, or say different numbers of processes.
      DeviceError: when the port is in use, nobody listens there, too few join in time, or the coordinator fails.
      SystemExit: with the status of the error that another process reports to end the meeting; with status 0 when this
        process was waiting for its place in a run that is now done.
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
    with contextlib.suppress(OSError, ValueError), socket.create_connection(("localhost", port), timeout=3) as found:
        send(found, {"ping": True})
        return isinstance(json.loads(found.makefile("r", encoding="utf-8").readline(coordinator.LINE_BYTES)), dict)
    return False


def _start(
    server: socket.socket, address: str, number: int, *, timeout_s: float, sizes: Sequence[int]
) -> socket.socket:
    """Starts the coordinator in its own session, which no signal to this group reaches; returns rank 0's connection."""
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
    """How the coordinator that this process has started ended, as in 'killed by SIGKILL', and its last lines.

    Empty while it runs, and where another process has started it.
    """
    if not _started:
        return ""
    process, errors = _started[-1]
    try:
        status = process.wait(_ENDING_S)  # its connection closes shortly before it has ended
    except subprocess.TimeoutExpired:
        return ""
    end = f"killed by {signal_name(-status)}" if status < 0 else f"ended with status {status}"
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
    membership: Membership | None  # None when the coordinator closed the connection
    waited: bool  # whether the coordinator had told this process to wait for the end of the present run


def _answered(connection: socket.socket, host: str, rank: int) -> _Answer:
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
    while line := lines.readline(coordinator.LINE_BYTES):
        try:
            message = json.loads(line)
        except ValueError:
            return  # no coordinator
        if isinstance(message, dict):
            yield message


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")
