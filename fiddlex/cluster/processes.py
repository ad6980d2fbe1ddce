"""The processes of a run: how they find each other, what they agree on, and how all end when one fails.

A run has one process or several, each with devices of its own; all run the same program. Slurm, Kubernetes, Open MPI or
a script starts them, and `join` connects them by `jax.distributed` before jax's first use. From then on
`jax.devices()` are the devices of all processes, and a compiled program runs on all of them.

The first process (rank 0) speaks for all: it prints results and log lines, and writes the files of a run. The other
processes log only warnings, with their rank, and their standard output is dropped. When a process fails, it says so
once, with its rank and host, and the others end with the same status and without a message.

Code that a run with one process shares with this module needs no case distinction: there, `is_first` is true, and the
other functions return at once.
"""

import collections
import contextlib
import json
import logging
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn, TypeVar

from fiddlex.cluster.peers import FAILED, Peers
from fiddlex.cluster.rendezvous import meet
from fiddlex.cluster.stopping import AgreedStop
from fiddlex.config.ending import end_by
from fiddlex.errors import ConfigError, DeviceError

T = TypeVar("T")

JOIN_S = 300  # seconds in which all processes have to join
WAIT_S = 600  # seconds in which they have to come to a common point
_HEARTBEAT_S = 3600  # of jax itself, which ends a process with a stack trace; `Peers` is sooner
_END_S = 5.0  # seconds that a failing process waits for the others to end
_ENDED, _SAID, _POSTED = "fiddlex/ended", "fiddlex/said", "fiddlex/posted"
_FAILURE_STATUS = 1
_POLL_S = 0.2  # between looks at whether the others have ended


class Cluster(NamedTuple):
    """The place of this process among those of the run.

    Attributes:
      process_id: its rank, counted from 0.
      num_processes: how many processes the run has.
      client: the client of jax's coordination service; None in a run of one process.
    """

    process_id: int = 0
    num_processes: int = 1
    client: Any = None


_cluster = Cluster()
_peers: Peers | None = None
_uses: collections.Counter[str] = collections.Counter()


def is_first() -> bool:
    """Whether this process speaks and writes for all: rank 0, or the only process."""
    return _cluster.process_id == 0


def num_processes() -> int:
    """The number of processes of the run."""
    return _cluster.num_processes


def join(
    address: str | None = None,
    number: int | None = None,
    rank: int | None = None,
    *,
    timeout_s: int = JOIN_S,
) -> None:
    """Connects the processes of a run, if it has several; to be called before jax's first use in the process.

    Without arguments jax finds the processes itself under Slurm, Open MPI and Kubernetes and on TPU pods; elsewhere the
    run has one process.

    Args:
      address: HOST:PORT of the first process, which all processes must reach and where it can listen.
      number: how many processes the run has.
      rank: the rank of this one, from 0.
      timeout_s: seconds to wait until all processes have joined.

    Raises:
      ConfigError: when only some of the three are given, or they contradict each other.
      DeviceError: when the processes do not find each other in time.
    """
    global _cluster, _peers
    if address is number is rank is None:
        if not _is_launched():
            return
    else:
        _check(address, number, rank)
    if _cluster.client is not None:
        return
    if address is not None and number is not None and rank is not None:
        meet(address, number, rank, timeout_s=timeout_s)
    import jax  # a run of one process with a mistake in its config ends sooner without

    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM, which `StopSignals` handles
    try:
        jax.distributed.initialize(
            address,
            number,
            rank,
            initialization_timeout=timeout_s,
            heartbeat_timeout_seconds=_HEARTBEAT_S,
        )
    except (RuntimeError, ValueError, OSError) as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DeviceError(f"jax cannot connect the processes of the run: {first_line}") from error
    from jax._src.distributed import global_state as state  # jax has no public access to its key-value store

    _cluster = Cluster(state.process_id, state.num_processes, state.client)
    _let_first_speak()
    if _cluster.num_processes > 1:
        end_by(_end_all, crashed=_crashed)
        _peers = Peers(_cluster.client, _cluster.process_id, _cluster.num_processes, lost=_lost, leave=_leave)


def _check(address: str | None, number: int | None, rank: int | None) -> None:
    given = {"--coordinator_address": address, "--num_processes": number, "--process_id": rank}
    missing = [name for name, value in given.items() if value is None]
    if address is None or number is None or rank is None:
        raise ConfigError(
            f"{' and '.join(name for name in given if name not in missing)} without {' and '.join(missing)}: give all "
            "three, as in --coordinator_address=HOST:PORT --num_processes=4 --process_id=0, or none."
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(f"--coordinator_address={address} must be HOST:PORT, as in 10.0.0.1:12345.")
    if number < 1 or not 0 <= rank < number:
        raise ConfigError(
            f"--num_processes={number} and --process_id={rank}: there must be at least one process, and the ranks are "
            "0 to --num_processes − 1."
        )


def _is_launched() -> bool:
    """Whether the environment is that of one of several processes that a launcher started."""

    def several(variable: str) -> bool:
        return os.environ.get(variable, "") not in ("", "0", "1")

    slurm = several("SLURM_STEP_NUM_TASKS")  # of srun; a script of sbatch is one process, whatever SLURM_NTASKS says
    mpi = several("OMPI_COMM_WORLD_SIZE")
    kubernetes = "JOB_COMPLETION_INDEX" in os.environ and "KUBERNETES_SERVICE_HOST" in os.environ
    tpus = "," in os.environ.get("TPU_WORKER_HOSTNAMES", "") or "MEGASCALE_COORDINATOR_ADDRESS" in os.environ
    return slurm or mpi or kubernetes or tpus


def _let_first_speak() -> None:
    """Lets only the first process write to standard output; the others log warnings alone, with their rank."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # gloo, which connects CPUs, prints there
    sys.stdout = os.fdopen(kept if is_first() else nowhere, "w", encoding="utf-8", buffering=1)
    if is_first():
        return
    log = logging.getLogger("fiddlex")
    log.setLevel(logging.WARNING)
    for handler in log.handlers:
        handler.setFormatter(logging.Formatter(f"rank {_cluster.process_id}: %(message)s"))


def barrier(name: str) -> None:
    """Waits until all processes have come to the barrier of this name; they come to all barriers in the same order.

    Raises:
      DeviceError: when some do not come in time.
    """
    if _cluster.client is None:
        return
    try:
        _cluster.client.wait_at_barrier(_once(f"fiddlex/at/{name}"), 1000 * WAIT_S)
    except Exception as error:
        raise DeviceError(
            f"Not all {_cluster.num_processes} processes came to {name} within {WAIT_S} s: {error}"
        ) from error


def told_by_first(name: str, make: Callable[[], T]) -> T:
    """What `make` returns on the first process, a value of JSON; the others wait for it and do not call it.

    Args:
      name: what the value is, for messages.
      make: is called on the first process only.

    Raises:
      DeviceError: when the first process does not tell it in time.
    """
    if _cluster.client is None:
        return make()
    key = _once(f"{_SAID}/{name}")
    if is_first():
        made = make()
        _cluster.client.key_value_set(key, json.dumps(made))
        return made
    try:
        told: T = json.loads(_cluster.client.blocking_key_value_get(key, 1000 * WAIT_S))
    except Exception as error:
        raise DeviceError(f"Process 0 did not tell the {name} within {WAIT_S} s: {error}") from error
    return told


def gather(name: str, value: object) -> list[Any]:
    """The values of all processes, in the order of their ranks; waits until each has given its own.

    Args:
      name: what the value is, for messages.
      value: this process's value, of JSON.

    Raises:
      DeviceError: when not all processes come in time.
    """
    if _cluster.client is None:
        return [value]
    key = _once(f"{_SAID}/all/{name}")
    _cluster.client.key_value_set(f"{key}/{_cluster.process_id}", json.dumps(value))
    barrier(name)
    said = _by_rank(key)
    return [said[rank] for rank in range(_cluster.num_processes)]


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
    """Checks that all processes have the same facts, which are values of JSON by their names.

    Raises:
      ConfigError: names each fact that differs, and the ranks with each value.
      DeviceError: when not all processes come in time.
    """
    if _cluster.client is None:
        return
    said = dict(enumerate(gather("the comparison of their configs", facts)))
    different = []
    for name in facts:
        by_value: dict[str, list[int]] = {}
        for rank, theirs in sorted(said.items()):
            by_value.setdefault(repr(theirs.get(name)), []).append(rank)
        if len(by_value) > 1:
            values = (f"{value} on rank {', '.join(map(str, ranks))}" for value, ranks in by_value.items())
            different.append(f"{name} is {' and '.join(values)}")
    if different:
        raise ConfigError(
            "The processes of a run must have the same config, data and versions:\n  " + "\n  ".join(different)
        )


def _once(name: str) -> str:
    """A name that is used once: with the number of times that this process has used it."""
    _uses[name] += 1
    return f"{name}/{_uses[name]}"


def agreed_stop() -> AgreedStop:
    """Lets the processes agree on the step after which they stop."""
    client = _cluster.client if _cluster.num_processes > 1 else None
    return AgreedStop(client, _cluster.process_id, _cluster.num_processes)


def set_peer_timeout(seconds: float) -> None:
    """Makes a process count as lost after `seconds` of silence."""
    if _peers is not None:
        _peers.timeout_s = seconds


def _end_all(message: str, status: int) -> NoReturn:
    """Prints the message, unless another process has failed before, and ends all processes with `status`."""
    try:
        _cluster.client.key_value_set(FAILED, json.dumps({"rank": _cluster.process_id, "status": status}))
    except Exception as error:
        if "ALREADY_EXISTS" in str(error):  # another process was first
            _leave(status)
    sys.stderr.write(f"rank {_cluster.process_id} ({socket.gethostname()}), {message}\n")
    _leave(status)


def _lost(message: str, ranks: list[int]) -> NoReturn:
    """Ends all processes where some are lost. Where it is the first, no store answers, and each one says so."""
    message = f"{os.path.basename(sys.argv[0])}: {message}"
    if is_first():
        with contextlib.suppress(Exception):
            for rank in ranks:
                _cluster.client.key_value_set(f"{_ENDED}/{rank}", "")
        _end_all(message, _FAILURE_STATUS)
    sys.stderr.write(f"rank {_cluster.process_id} ({socket.gethostname()}), {message}\n")
    sys.stderr.flush()
    os._exit(_FAILURE_STATUS)


def _crashed(error: BaseException) -> None:
    """Ends all processes after an error that nobody expected: the loss of another process, or a defect."""
    assert _peers is not None
    if type(error).__name__ == "JaxRuntimeError":
        _peers.suspect()
    _end_all("".join(traceback.format_exception(error)).rstrip(), _FAILURE_STATUS)


def _leave(status: int) -> NoReturn:
    """Ends this process; the first one, which keeps the store, after the others, since jax aborts them without it."""
    sys.stderr.flush()
    with contextlib.suppress(Exception):
        _cluster.client.key_value_set(f"{_ENDED}/{_cluster.process_id}", "")
        deadline = time.monotonic() + _END_S
        while is_first() and time.monotonic() < deadline:
            if len(_cluster.client.key_value_dir_get(_ENDED)) >= _cluster.num_processes:
                time.sleep(_POLL_S)  # until they have left
                break
            time.sleep(_POLL_S / 4)
    os._exit(status)  # at a usual exit jax would wait for the others
