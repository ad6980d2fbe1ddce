"""Where the processes of a run meet before jax connects them: a TCP port of the first process.

jax ends a process with a stack trace where it does not reach its coordinator or where processes are missing. So the
first process listens at the coordinator's address before jax does; each other one comes and says its rank. Once all
have come, the first process closes the port, which jax then opens. Otherwise it says who is missing.
"""

import contextlib
import json
import socket
import sys
import time
from typing import Any, TextIO

from fiddlex.errors import ConfigError, DeviceError

_RETRY_S, _ANSWER_S = 0.2, 5.0
_FAILURE_STATUS = 1


def meet(address: str, num_processes: int, process_id: int, *, timeout_s: float) -> None:
    """Returns once all processes have come.

    Args:
      address: HOST:PORT of the first process, with a port above 0.
      num_processes: how many there are.
      process_id: the rank of this one.
      timeout_s: seconds to wait.

    Raises:
      ConfigError: when two processes have one rank, or say different numbers of processes.
      DeviceError: when the port is in use, nobody listens at the address, or some do not come in time.
      SystemExit: on the other processes, when the first one has raised an error, which it tells for all.
    """
    if num_processes == 1:
        return
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + timeout_s
    if process_id == 0:
        _receive(address, int(port), num_processes, deadline=deadline, timeout_s=timeout_s)
    else:
        _come((host.strip("[]"), int(port)), num_processes, process_id, deadline=deadline, timeout_s=timeout_s)


def _receive(address: str, port: int, number: int, *, deadline: float, timeout_s: float) -> None:
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
        server = socket.create_server(("", port), family=family, dualstack_ipv6=family == socket.AF_INET6)
    except OSError as error:
        raise DeviceError(
            f"--coordinator_address={address}: process 0 cannot listen at port {port}: {error.strerror}. Choose a port "
            "that is free on its host."
        ) from error
    with contextlib.ExitStack() as stack:
        stack.enter_context(server)
        come: dict[int, TextIO] = {}
        try:
            while len(come) < number - 1:
                server.settimeout(max(deadline - time.monotonic(), 0.001))
                connection, _ = server.accept()
                stack.enter_context(connection)
                connection.settimeout(_ANSWER_S)
                stream: TextIO = stack.enter_context(connection.makefile("rw", encoding="utf-8"))
                said = _read(stream) or {}
                if {"rank", "number", "host"} <= said.keys():  # else a stranger, such as a scan of ports
                    _check(said, number, come)
                    come[said["rank"]] = stream
        except TimeoutError as error:
            missing = [str(rank) for rank in range(1, number) if rank not in come]
            raise _told(
                come,
                DeviceError(
                    f"{1 + len(come)} of {number} processes have come to --coordinator_address={address} within "
                    f"{timeout_s:g} s, {'all but rank' if len(missing) == 1 else 'without the ranks'} "
                    f"{', '.join(missing)}. Start all of them, and see that their hosts reach this address."
                ),
            ) from error
        except ConfigError as error:
            raise _told(come, error) from error
        for stream in come.values():
            _write(stream, {"go": True})


def _check(said: dict[str, Any], number: int, come: dict[int, TextIO]) -> None:
    rank, theirs = said["rank"], said["number"]
    if theirs != number:
        raise ConfigError(
            f"--num_processes is {number} on rank 0 and {theirs} on rank {rank} ({said['host']}). Give all the same."
        )
    if rank in come or not 0 < rank < number:
        raise ConfigError(
            f"--process_id={rank} was given to two processes, the second on {said['host']}. Number them from 0 to "
            f"{number - 1}."
        )


def _told(come: dict[int, TextIO], error: ConfigError | DeviceError) -> ConfigError | DeviceError:
    """`error`, which the processes that have come get to know of, so that they end too."""
    for stream in come.values():
        _write(stream, {"go": False})
    return error


def _come(place: tuple[str, int], number: int, rank: int, *, deadline: float, timeout_s: float) -> None:
    reason = "no answer"
    while time.monotonic() < deadline:
        try:
            with (
                socket.create_connection(place, timeout=max(deadline - time.monotonic(), 0.001)) as connection,
                connection.makefile("rw", encoding="utf-8") as stream,
            ):
                _write(stream, {"rank": rank, "number": number, "host": socket.gethostname()})
                answer = _read(stream)
        except OSError as error:
            reason = error.strerror or str(error)
            time.sleep(_RETRY_S)
            continue
        if answer is None or not answer.get("go"):  # process 0 has ended, and has said why
            sys.exit(_FAILURE_STATUS)
        return
    raise DeviceError(
        f"Process {rank} of {number} did not reach --coordinator_address={place[0]}:{place[1]} within {timeout_s:g} s: "
        f"{reason}. Check the address, and that process 0 runs there."
    )


def _read(stream: TextIO) -> dict[str, Any] | None:
    """A line of JSON; None where there is none."""
    try:
        value = json.loads(stream.readline(4096))
        return value if isinstance(value, dict) else None
    except (ValueError, OSError):
        return None


def _write(stream: TextIO, value: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        stream.write(json.dumps(value) + "\n")
        stream.flush()
