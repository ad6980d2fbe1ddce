"""The processes of a run: how they find each other, what they agree on, and how all end when one fails.

Slurm, Kubernetes, Open MPI or a script starts the processes, each with devices of its own. `join` connects them by
`jax.distributed` before jax's first use; from then on `jax.devices()` are the devices of all processes, and a compiled
program runs on all of them. A coordinator beside rank 0 (`fiddlex.cluster.coordinator`) watches them.

Rank 0 prints and logs for all, and writes the files of a run. The others log only warnings, with their rank, and their
standard output is dropped. When a process fails, it reports its error once, with its rank and host, and the others end
with the same status and without a message. In a run of one process `is_first` is true, and the other functions return
at once.
"""

import collections
import contextlib
import json
import logging
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple, NoReturn, TypeVar

from fiddlex.cluster.addresses import check_reachable, connect_cpus_at
from fiddlex.cluster.coordinator import listed
from fiddlex.cluster.launchers import Place, find_place, given_place, is_launched
from fiddlex.cluster.peers import Peers
from fiddlex.cluster.rendezvous import Membership, leave_coordinator, meet
from fiddlex.cluster.stopping import AgreedStop
from fiddlex.errors import ConfigError, DeviceError, Stopped
from fiddlex.terminal import interrupts, progress
from fiddlex.terminal.ending import end_by

logger = logging.getLogger(__name__)

T = TypeVar("T")

JOIN_S = 300  # seconds in which all processes have to join
WAIT_S = 600  # seconds in which they have to come to a common point
_HEARTBEAT_S = 3600  # of jax itself, which ends a process with a stack trace; the coordinator is sooner
_SHARED, _POSTED = "fiddlex/shared", "fiddlex/posted"
_FAILURE_STATUS = 1
_POLL_S = 0.2  # between chances for a handler of signals


class Cluster(NamedTuple):
    """The place of this process among those of the run."""

    process_id: int = 0
    num_processes: int = 1
    client: Any = None  # of jax's coordination service; None in a run of one process


_cluster = Cluster()
_peers: Peers | None = None
_stop: AgreedStop | None = None
_uses: collections.Counter[str] = collections.Counter()


def is_first() -> bool:
    """Whether this process prints, logs and writes for all: rank 0, or the only process."""
    return _cluster.process_id == 0


def num_processes() -> int:
    return _cluster.num_processes


def join(
    address: str | None = None,  # HOST:PORT of the first process, which all must reach and where it can listen
    number: int | None = None,  # of processes in the run
    rank: int | None = None,  # of this process, from 0
    *,
    timeout_s: int = JOIN_S,
    # takes `number`; returns the smaller numbers with which the run can go on if some do not join; None: all must join
    sizes: Callable[[int], Sequence[int]] | None = None,
) -> int:
    """Connects the processes of a run, if it has several, before jax's first use; returns how many were to join.

    Without arguments jax finds the processes itself under Slurm, Open MPI and Kubernetes and on TPU pods; elsewhere the
    run has one process. `num_processes` tells how many have joined.

    Raises:
      ConfigError: when only some of the first three arguments are given, or they contradict each other.
      DeviceError: when the processes do not find each other in time.
    """
    global _cluster, _peers
    if _cluster.client is not None:
        return _cluster.num_processes
    if address is number is rank is None:
        if not is_launched():
            return 1
        place = find_place(timeout_s=timeout_s)
    else:
        place = given_place(address, number, rank)
    if place.number == 1:
        return 1
    allowed = sizes(place.number) if sizes and place.rank == 0 else ()
    _handle_signals()
    membership = meet(place.address, place.number, place.rank, timeout_s=timeout_s, sizes=allowed)
    _connect(membership, place, timeout_s=timeout_s)
    if membership.missing and is_first():
        ranks = listed(list(membership.missing))
        text = "%d of %d processes have joined within %d s, without rank %s: the run goes on with %d."
        logger.warning(text, place.number - len(membership.missing), place.number, timeout_s, ranks, membership.number)
    return place.number


def _handle_signals() -> None:
    """Lets a signal to this process stop all processes, until training handles signals itself (`StopSignals`)."""

    def handle(number: int, frame: FrameType | None) -> None:
        if _stop is None:
            raise Stopped(number)
        _stop.ask(number)

    if threading.current_thread() is threading.main_thread():  # Python allows no handlers in other threads
        for number in interrupts.stop_signals():
            signal.signal(number, handle)
        interrupts.may_leave_if(lambda number, times: False)  # the others would take this one for lost


def _connect(membership: Membership, place: Place, *, timeout_s: int) -> None:
    global _cluster, _peers, _stop
    _cluster = Cluster(membership.rank, membership.number)
    _peers = Peers(membership, lost=_lost, leave=_leave)  # sends `alive` from now on
    _stop = AgreedStop(_peers, _leave, logs=is_first())
    import jax  # a run of one process with a mistake in its config ends sooner without

    end_by(_end_all, crashed=_crashed, finished=_finished)
    check_reachable(membership.service)
    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM, which `StopSignals` handles
    try:
        jax.distributed.initialize(
            membership.service,
            membership.number,
            membership.rank,
            place.local_devices,
            cluster_detection_method="deactivate",
            initialization_timeout=timeout_s,
            heartbeat_timeout_seconds=_HEARTBEAT_S,
            # jax gives rank 0 a service of its own, which nobody uses: that of the coordinator outlives rank 0.
            coordinator_bind_address="localhost:0",
        )
    except (RuntimeError, ValueError, OSError) as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DeviceError(f"jax cannot connect the processes of the run: {first_line}") from error
    from jax._src.distributed import global_state as state  # jax has no public access to its client

    connect_cpus_at(membership.address, state.client)
    _cluster = _cluster._replace(client=state.client)
    _let_first_print()


def _let_first_print() -> None:
    """Lets only the first process write to standard output; the others log warnings alone, with their rank."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # gloo, which connects CPUs, prints there
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    first = kept if is_first() else nowhere
    sys.stdout = os.fdopen(first, "w", encoding=encoding, errors=errors, buffering=1, closefd=False)
    if is_first():
        return
    progress.show_nothing()
    log = logging.getLogger("fiddlex")
    log.setLevel(logging.WARNING)
    for handler in log.handlers:
        handler.setFormatter(logging.Formatter(f"rank {_cluster.process_id}: %(message)s"))


def barrier(name: str) -> None:
    """Waits until all processes have reached the barrier of this name; all reach the barriers in the same order."""
    if _cluster.client is None:
        return
    try:
        _await(_cluster.client.wait_at_barrier, _once(f"fiddlex/at/{name}"))
    except Exception as error:
        raise DeviceError(
            f"The wait of {_cluster.num_processes} processes for {name} failed, or took more than {WAIT_S} s: {error}"
        ) from error


def _await(wait: Callable[[str, int], T], name: str) -> T:
    """What a blocking call of jax's client returns, in another thread, so that this one can handle signals."""
    done: queue.SimpleQueue[T | Exception] = queue.SimpleQueue()

    def run() -> None:
        try:
            done.put(wait(name, 1000 * WAIT_S))
        except Exception as error:
            done.put(error)

    threading.Thread(target=run, name="fiddlex-wait", daemon=True).start()
    while True:
        with contextlib.suppress(queue.Empty):
            found = done.get(timeout=_POLL_S)
            if isinstance(found, Exception):
                raise found
            return found


def told_by_first(name: str, make: Callable[[], T]) -> T:
    """What `make` returns on the first process, a value of JSON; the others wait for it and do not call `make`."""
    if _cluster.client is None:
        return make()
    key = _once(f"{_SHARED}/{name}")
    if is_first():
        made = make()
        _cluster.client.key_value_set(key, json.dumps(made))
        return made
    try:
        told: T = json.loads(_await(_cluster.client.blocking_key_value_get, key))
    except Exception as error:
        raise DeviceError(
            f"Rank 0 did not tell the {name}: the wait failed, or took more than {WAIT_S} s: {error}"
        ) from error
    return told


def gather(name: str, value: object) -> list[Any]:
    """The values of all processes, of JSON, in the order of their ranks; waits until each has given its own."""
    if _cluster.client is None:
        return [value]
    key = _once(f"{_SHARED}/all/{name}")
    _cluster.client.key_value_set(f"{key}/{_cluster.process_id}", json.dumps(value))
    barrier(name)
    values = _by_rank(key)
    return [values[rank] for rank in range(_cluster.num_processes)]


def post(name: str, value: object) -> None:
    """Shows a value of JSON to all processes, in place of the one that this process posted before under this name."""
    if _cluster.client is not None:
        key = f"{_POSTED}/{name}/{_cluster.process_id}"
        _cluster.client.key_value_set(key, json.dumps(value), allow_overwrite=True)


def posted(name: str) -> dict[int, Any]:
    """What each process has posted last under a name, by rank; does not wait, and is empty in a run of one process."""
    return {} if _cluster.client is None else _by_rank(f"{_POSTED}/{name}")


def _by_rank(key: str) -> dict[int, Any]:
    values = _cluster.client.key_value_dir_get(key)
    return {int(place.rpartition("/")[2]): json.loads(value) for place, value in values}


def check_equal(facts: Mapping[str, object]) -> None:
    """Checks that all processes have the same facts, values of JSON by name; ConfigError names those that differ."""
    if _cluster.client is None:
        return
    all_facts = gather("the comparison of their configs", facts)
    different = []
    for name in facts:
        by_value: dict[str, list[int]] = {}
        for rank, theirs in enumerate(all_facts):
            by_value.setdefault(repr(theirs.get(name)), []).append(rank)
        if len(by_value) > 1:
            values = (f"{value} on rank {', '.join(map(str, ranks))}" for value, ranks in by_value.items())
            different.append(f"{name} is {' and '.join(values)}")
    if different:
        raise ConfigError(
            "The processes of a run must have the same workdir, config, data and versions:\n  " + "\n  ".join(different)
        )


def _once(name: str) -> str:
    """A name that is used once: with the number of times that this process has used it."""
    _uses[name] += 1
    return f"{name}/{_uses[name]}"


def agreed_stop() -> AgreedStop:
    return _stop or AgreedStop(None, _leave)


def set_peer_timeout(seconds: float) -> None:
    """Makes a process count as lost after `seconds` of silence."""
    if _peers is not None:
        _peers.set_timeout(seconds)


def _end_all(message: str, status: int) -> NoReturn:
    """Prints the message, unless another process prints one, and ends all processes with `status`."""
    _fail(message, status, collective=False)


def _crashed(error: BaseException) -> NoReturn:
    """Ends all processes after an error that nobody expected: the loss of another process, or a defect."""
    text = "".join(traceback.format_exception(error)).rstrip()
    _fail(text, _FAILURE_STATUS, collective=type(error).__name__ == "JaxRuntimeError")


def _fail(message: str, status: int, *, collective: bool) -> NoReturn:
    assert _peers is not None
    _peers.fail(status, collective=collective)
    _print_error(message)
    _leave(status)


def _lost(what: str) -> NoReturn:
    """Reports that a process or the coordinator is lost, and ends this process; the others end without a message."""
    program = os.path.basename(sys.argv[0])
    _print_error(f"{program}: lost {what}. All processes end; the next start goes on from the newest checkpoint.")
    _leave(_FAILURE_STATUS)


def _print_error(message: str) -> None:
    sys.stderr.write(f"rank {_cluster.process_id} ({socket.gethostname()}), {message}\n")


def _finished(status: int) -> None:
    """Waits until all processes have reached their end: from then on, one that ends is no failure."""
    assert _peers is not None
    barrier("the end of the program")
    _peers.finish(status)
    leave_coordinator()


def _leave(status: int) -> NoReturn:
    """Ends this process at once, from any thread."""
    sys.stderr.flush()
    progress.leave_terminal()
    os._exit(status)  # at a usual exit jax would wait for the others
