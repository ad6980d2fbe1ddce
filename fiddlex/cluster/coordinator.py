"""The coordinator of a run of several processes: a program of its own, which rank 0 starts on its host.

It has three jobs.

- *Meeting.* Every process connects to the coordinator's port and says its rank. Once all have joined, the coordinator
  starts jax's coordination service and tells each process to start. If some do not join in time, rank 0 reports which
  are missing; with `sizes`, as many of those that have joined start as one of these numbers allows, under new ranks.
- *Jax's coordination service.* jaxlib aborts every process with a stack trace as soon as this service is gone, so it
  must not end with any process of the run, rank 0 included.
- *Watch.* Every process keeps its connection and says each second that it is alive. When a connection closes before its
  process has finished, or a process is silent for too long, one of the others reports it and all end. An error is
  reported by the first process that asks; the others end without a message. The processes also agree here on the step
  after which they stop.

Both sides send lines of JSON, each an object with one key, which names the message. A process sends

    join          {"rank", "number", "host"}: its first message; `number` is its --num_processes
    ping          is a coordinator listening? (the only message of a connection that does not join)
    alive         each second, and in answer to `alive` until the run begins
    peer_timeout  seconds of silence after which any process counts as lost
    failed        {"status", "collective"}: it has an error, and waits until it may report it
    finished      its status: it ends, and that is no failure
    stop          the number of a signal: all shall stop after the same step, or end if the run has not begun
    dispatched    the last step that it has dispatched, once it has been asked to stop

and the coordinator sends

    alive         each second, and in answer to `ping`
    missing       to rank 0 until all have joined: {"ranks", a text; "seconds_left"}
    start         {"rank", "number", "address", "port", "missing"}: the run begins; `address` is that of this host, and
                  `port` that of jax's service
    wait          the run begins or goes on without this process, which joins again when the connection closes
    refused       {"text", "status"}: report this error of the meeting, and end
    report        report your error, and end
    lost          {"processes", "silent_s"}: report these as lost, and end
    end           a status: end with it, without a message
    stop          {"signal", "rank" that got it}: say the last step that you have dispatched, and dispatch no other
    stop_after    the step after which all stop

This file imports nothing of fiddlex: Python runs it as a script, which starts in a fraction of a second.

    python coordinator.py '{"server": 5, "first": 6, "address": "host0:12345", "number": 4, "timeout_s": 300, …}'
"""

import contextlib
import ipaddress
import json
import math
import resource
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

ALIVE_S = 1.0  # seconds between two signs of life, in both directions
# Of silence, after which a process counts as lost once a collective has failed, and another may come with its rank.
SUSPECTED_S = 5.0
PEER_TIMEOUT_S = 60.0  # of silence, after which it is lost, until the run has sent its train.peer_timeout_s
MOST_SECONDS = 604800  # of any time-out: a week
LINE_BYTES = 2**16  # of the longest line: the ranks and hosts of a large run
_LINGER_S = 10.0  # seconds that the coordinator of an ending run waits for processes that do not end
_JOIN_S = 10.0  # seconds from connecting to joining
_HOST_CHARACTERS = 255  # of the longest name of a host
_HEARTBEAT_S = 3600  # of jax's service, which would end processes with a stack trace; the watch is sooner
_SHUTDOWN_S = 30  # seconds that a process which ends waits for the others, in jax's service
_LONGEST_S = 1e10  # of silence that a process can ask for
_SHOWN = 8  # ranks that a message lists at most
_FAILED, _MISUSED = 1, 2  # the statuses that fiddlex's programs end with

Message = dict[str, Any]


class Process:
    """One process of the run, or one that wants to be, and its connection."""

    def __init__(self, connection: socket.socket, rank: int, host: str):
        connection.setblocking(False)
        self.connection, self.host = connection, host
        # The rank that it joined with, −1 before it joins. Once the run begins, `rank` is its rank in the run.
        self.process_id = self.rank = rank
        self.heard_s = self.connected_s = time.monotonic()  # when it was last heard of
        self.finished = False  # whether it has said that it ends without a failure
        self.dispatched: int | None = None  # the last step that it has dispatched, once it has been asked
        self._buffer = b""

    def send(self, **message: Any) -> None:
        """Sends a message; does nothing where the connection is broken or full."""
        with contextlib.suppress(OSError):
            self.connection.send(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[Message] | None:
        """The messages that have arrived; None when the connection is closed, or what came is no message."""
        try:
            received = self.connection.recv(2**16)
        except BlockingIOError:
            return []
        except OSError:
            return None
        *lines, self._buffer = (self._buffer + received).split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            return None
        if not received or len(self._buffer) > LINE_BYTES or not all(isinstance(each, dict) for each in messages):
            return None
        return messages


class ProtocolError(Exception):
    """A connection sends what no process of a run sends, as a scan of ports does."""


class Failure(NamedTuple):
    """An error that a process wants to report."""

    process: Process
    status: int  # that all shall end with
    asked_s: float  # by the monotonic clock


class Coordinator:
    """See the module's docstring."""

    def __init__(
        self,
        server: socket.socket,  # which listens
        first: socket.socket,  # to rank 0, which has started the coordinator
        *,
        address: str,  # HOST:PORT as the user gave it, for messages
        number: int,
        timeout_s: float,  # in which all have to join
        sizes: list[int],  # smaller numbers of processes that the run can go on with
    ):
        self._address, self._number, self._timeout_s, self._sizes = address, number, timeout_s, sizes
        self._deadline_s = time.monotonic() + timeout_s
        self._selector = selectors.DefaultSelector()
        self._server = server
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ)
        self._members: dict[int, Process] = {}  # by rank, of those whose connection is open
        self._strangers: set[Process] = set()  # that have not joined
        self._add(first, rank=0, host=socket.gethostname())
        self._waiting: list[Process] = []  # for the end of the present run, in which they have no place
        self._service: Any = None  # of jax, once the run has begun
        self._bound: socket.socket | None = None  # to the port of jax's service
        self._ends_s = math.inf  # when the coordinator ends at the latest; finite once all have been told to end
        self._peer_timeout_s = PEER_TIMEOUT_S
        self._failure: Failure | None = None
        self._stops = False  # whether a process has asked all to stop
        self._alive_s = 0.0  # when `alive` was last sent
        self._done = False  # whether the last process that finished had status 0

    def run(self) -> None:
        """Serves until the last process of the run is gone."""
        while not self._is_over():
            for key, _ in self._selector.select(timeout=ALIVE_S / 5):
                if key.fileobj is self._server:
                    self._accept()
                else:
                    self._serve(key.data)
            self._drop_strangers()
            if self._service is None:
                self._meet()
            else:
                self._watch()
        self._server.close()  # before jax's service, which takes its time
        for process in self._waiting:
            if self._done:
                process.send(end=0)  # nothing is left for it to do
        for process in [*self._members.values(), *self._waiting]:
            process.connection.close()

    @property
    def _is_ending(self) -> bool:
        """Whether all processes have been told to end."""
        return self._ends_s < math.inf

    def _is_over(self) -> bool:
        if self._is_ending:
            return not self._members or time.monotonic() > self._ends_s
        return self._service is not None and not self._members

    def _accept(self) -> None:
        try:
            self._add(self._server.accept()[0])
        except OSError:  # too many files are open
            time.sleep(ALIVE_S / 5)

    def _add(self, connection: socket.socket, *, rank: int = -1, host: str = "") -> None:
        process = Process(connection, rank, host)
        self._selector.register(connection, selectors.EVENT_READ, process)
        if rank >= 0:
            self._members[rank] = process
        else:
            self._strangers.add(process)

    def _drop_strangers(self) -> None:
        """Closes connections that have not joined in time, as those of scans of ports."""
        limit_s = time.monotonic() - _JOIN_S
        for process in [each for each in self._strangers if each.connected_s < limit_s]:
            self._closed(process)

    def _serve(self, process: Process) -> None:
        messages = process.receive()
        if messages is None:
            self._closed(process)
            return
        process.heard_s = time.monotonic()
        try:
            for message in messages:
                self._handle(process, message)
        except (ProtocolError, ArithmeticError, TypeError, ValueError, KeyError):
            self._closed(process)

    def _handle(self, process: Process, message: Message) -> None:
        ((name, value),) = message.items() if len(message) == 1 else (("", None),)
        if name == "ping":
            process.send(alive=True)
        elif (name == "join") == (process.rank >= 0):  # joins a second time, or sends something else first
            raise ProtocolError
        elif handle := getattr(self, f"_on_{name}", None):
            handle(process, value)

    def _closed(self, process: Process) -> None:
        self._selector.unregister(process.connection)
        process.connection.close()
        self._strangers.discard(process)
        if process in self._waiting:
            self._waiting.remove(process)
        if self._members.get(process.rank) is process:
            del self._members[process.rank]
            if process.finished or self._is_ending:
                return
            if self._service is not None:
                self._lost([process], silent_s=None)
            elif process.rank == 0:  # others may join again
                self._end_meeting(f"Process 0 ({process.host}) ended before all processes had joined.", _FAILED)

    # The meeting.

    def _on_join(self, process: Process, value: Any) -> None:
        kinds = {"rank": int, "number": int, "host": str}
        if not isinstance(value, dict) or {name: type(each) for name, each in value.items()} != kinds:
            raise ProtocolError
        if value["rank"] < 0 or len(value["host"]) > _HOST_CHARACTERS or not value["host"].isprintable():
            raise ProtocolError
        self._strangers.discard(process)
        process.rank = process.process_id = value["rank"]
        process.host = value["host"]
        there = next((each for each in self._members.values() if each.process_id == process.process_id), None)
        if there is not None and time.monotonic() - there.heard_s > SUSPECTED_S:  # its host is off, or was cut off
            if self._service is None:
                self._closed(there)
            there = None
        if value["number"] != self._number:
            self._refuse(process, f"--num_processes is {self._number} on rank 0 and {value['number']}")
        elif not 0 <= process.rank < self._number:
            self._refuse(process, f"--process_id={process.rank} is not among the ranks 0 to {self._number - 1}")
        elif there is not None and not self._is_ending:
            self._refuse(process, f"--process_id={process.rank} was given to two processes, on {there.host} and")
        elif self._service is not None or self._is_ending:
            process.send(wait=True)
            self._waiting.append(process)
        else:
            self._members[process.rank] = process

    def _refuse(self, process: Process, reason: str) -> None:
        """Ends the meeting because of a process that contradicts it; in a run that goes on, refuses only that one."""
        text = (
            f"{reason} on rank {process.rank} ({process.host}). All processes of a run need the same --num_processes, "
            f"and --process_id from 0 to {self._number - 1}; another run needs another --coordinator_address."
        )
        if self._service is None and process.rank:
            process.send(end=_MISUSED)
            self._end_meeting(text, _MISUSED)
        else:
            process.send(refused={"text": text, "status": _MISUSED})

    def _meet(self) -> None:
        if self._is_ending:
            return
        if len(self._members) == self._number:
            self._start(self._number)
        elif time.monotonic() > self._deadline_s:
            there = len(self._members)
            if size := max((size for size in self._sizes if size <= there), default=0):
                self._start(size)
                return
            missing = self._missing()
            named = f"{'all but rank' if len(missing) == 1 else 'without the ranks'} {listed(missing)}"
            self._end_meeting(
                f"{there} of {self._number} processes have joined at --coordinator_address={self._address} within "
                f"{self._timeout_s:g} s, {named}. Start all of them, and see that their hosts reach this address.",
                _FAILED,
            )
        else:
            self._say_alive()

    def _end_meeting(self, text: str, status: int) -> None:
        for process in self._members.values():
            first = process.rank == min(self._members)
            process.send(**({"refused": {"text": text, "status": status}} if first else {"end": status}))
        self._ends_s = time.monotonic() + _LINGER_S

    def _start(self, size: int) -> None:
        """Starts jax's service, and the run with the first `size` of those that have joined."""
        self._bound, self._service = _jax_service(size)
        port, address = self._bound.getsockname()[1], _address(self._members.values())
        joined = [self._members[rank] for rank in sorted(self._members)]
        self._members = dict(enumerate(joined[:size]))
        missing = sorted({*range(self._number)} - {process.rank for process in joined})
        for rank, process in self._members.items():
            process.rank, process.heard_s = rank, time.monotonic()  # from now on it says that it is alive
            process.send(start={"rank": rank, "number": size, "address": address, "port": port, "missing": missing})
        for process in joined[size:]:
            process.send(wait=True)
            self._waiting.append(process)

    # The watch.

    def _on_peer_timeout(self, process: Process, value: float) -> None:
        if not 0 < float(value) < _LONGEST_S:  # NaN would end the watch
            raise ProtocolError
        self._peer_timeout_s = float(value)

    def _on_finished(self, process: Process, status: int) -> None:
        process.finished, self._done = True, status == 0

    def _on_failed(self, process: Process, value: Message) -> None:
        if self._is_ending or self._failure is not None:
            return  # another one reports its error, or all have been told to end
        self._failure = Failure(process, int(value["status"]), time.monotonic())
        if not value["collective"]:
            self._let_report()

    def _let_report(self) -> None:
        assert self._failure is not None
        self._failure.process.send(report=True)
        self._end_others(self._failure.process, self._failure.status)

    def _watch(self) -> None:
        self._say_alive()
        if self._is_ending:
            return
        now = time.monotonic()
        limit = min(self._peer_timeout_s, SUSPECTED_S) if self._failure else self._peer_timeout_s
        if lost := [each for each in self._members.values() if not each.finished and now - each.heard_s > limit]:
            self._lost(lost, silent_s=limit)
        elif self._failure and all(
            each.finished or each.heard_s > self._failure.asked_s + ALIVE_S / 2 for each in self._members.values()
        ):
            self._let_report()  # all others live: the failure is this process's own

    def _say_alive(self) -> None:
        now = time.monotonic()
        if now - self._alive_s < ALIVE_S:
            return
        self._alive_s = now
        for process in [*self._members.values(), *self._waiting]:
            process.send(alive=True)
        if self._service is None:
            missing = {"ranks": listed(self._missing()), "seconds_left": self._deadline_s - now}
            self._members[0].send(missing=missing)

    def _missing(self) -> list[int]:
        return [rank for rank in range(self._number) if rank not in self._members]

    def _lost(self, lost: list[Process], *, silent_s: float | None) -> None:
        """Lets the first of the others report who is lost, and ends all."""
        others = [self._members[rank] for rank in sorted(self._members) if self._members[rank] not in lost]
        ranks = [[process.rank, process.host] for process in lost]
        if others:
            others[0].send(lost={"processes": ranks, "silent_s": silent_s})
            self._end_others(others[0], _FAILED)
        else:
            self._ends_s = time.monotonic()

    def _end_others(self, reporter: Process, status: int) -> None:
        for process in self._members.values():
            if process is not reporter:
                process.send(end=status)
        self._ends_s = time.monotonic() + _LINGER_S

    # The stop after the same step.

    def _on_stop(self, process: Process, number: int) -> None:
        if process in self._waiting:
            return  # only this one ends
        if self._service is None and not self._is_ending:
            for member in self._members.values():
                member.send(end=128 + int(number))
            self._ends_s = time.monotonic() + _LINGER_S
        elif not self._stops:
            self._stops = True
            for member in self._members.values():
                member.send(stop={"signal": int(number), "rank": process.rank})

    def _on_dispatched(self, process: Process, step: int) -> None:
        process.dispatched = step
        steps = [member.dispatched for member in self._members.values()]
        known = [each for each in steps if each is not None]
        if len(known) == len(steps):
            for member in self._members.values():
                member.send(stop_after=max(known))


def listed(ranks: list[int]) -> str:
    """Ranks for a message; of many, the first and how many others."""
    shown = ", ".join(map(str, ranks[:_SHOWN]))
    others = len(ranks) - _SHOWN
    return f"{shown} and {others} other{'s' * (others > 1)}" if others > 0 else shown


def _address(members: Iterable[Process]) -> str:
    """The address by which members on other hosts have reached this host, or that of its loopback interface."""
    connections = [process.connection for process in members if process.connection.family != socket.AF_UNIX]
    addresses = [connection.getsockname()[0].removeprefix("::ffff:") for connection in connections]
    return next((each for each in addresses if not ipaddress.ip_address(each).is_loopback), "127.0.0.1")


def _jax_service(size: int) -> tuple[socket.socket, Any]:
    """Jax's coordination service for `size` processes, and a socket that is bound to its port.

    jaxlib crashes where another program has the port. So the socket takes a free one and shares it with the service,
    which alone listens there; the socket must stay open as long as the service runs.
    """
    from jaxlib import _jax

    family, every_address = (socket.AF_INET6, "[::]") if socket.has_dualstack_ipv6() else (socket.AF_INET, "0.0.0.0")
    bound = socket.socket(family)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    bound.bind(("", 0))
    address = f"{every_address}:{bound.getsockname()[1]}"
    service = _jax.get_distributed_runtime_service(
        address, size, heartbeat_timeout=_HEARTBEAT_S, shutdown_timeout=_SHUTDOWN_S
    )
    return bound, service


def main() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # a connection for each process of the run
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    # Those of `fiddlex.terminal.interrupts.STOP_SIGNALS`, written out since this file imports nothing of fiddlex.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # Slurm may send one to all processes of a job, which save then
    arguments = json.loads(sys.argv[1])
    server, first = (socket.socket(fileno=arguments.pop(name)) for name in ("server", "first"))
    Coordinator(server, first, **arguments).run()


if __name__ == "__main__":
    main()
