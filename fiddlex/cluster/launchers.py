"""The place of a process among those of its run: from flags, or from the launcher that has started it.

jax's own cluster detection knows Slurm, Open MPI, Kubernetes and the environments of TPU pods.
"""

import os
import re
from typing import NamedTuple

from fiddlex.errors import ConfigError, DeviceError

_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"  # of a name, between two dots
_ADDRESS = re.compile(rf"(({_LABEL}\.)*{_LABEL}\.?|\[[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]+)?\]):[0-9]{{1,5}}")
_MOST_PROCESSES = 2**16


class Place(NamedTuple):
    """The place that a launcher gives a process."""

    address: str  # HOST:PORT of rank 0, which all processes reach
    number: int  # of processes
    rank: int  # of this process
    local_devices: list[int] | None = None  # numbers of the host's accelerators that this process uses; None: all


def given_place(address: str | None, number: int | None, rank: int | None) -> Place:
    """The place that the three flags give; ConfigError when they contradict each other, or only some are given."""
    given = {"--coordinator_address": address, "--num_processes": number, "--process_id": rank}
    missing = [name for name, value in given.items() if value is None]
    if address is None or number is None or rank is None:
        raise ConfigError(
            f"{' and '.join(name for name in given if name not in missing)} without {' and '.join(missing)}: give all "
            "three, as in --coordinator_address=HOST:PORT --num_processes=4 --process_id=0, or none."
        )
    if not _ADDRESS.fullmatch(address) or not 0 < int(address.rpartition(":")[2]) < 2**16:
        raise ConfigError(
            f"--coordinator_address={address} must be HOST:PORT, as in host0:12345, 10.0.0.1:12345 or [fd00::1]:12345."
        )
    if not 1 <= number <= _MOST_PROCESSES or not 0 <= rank < number:
        raise ConfigError(
            f"--num_processes={number} and --process_id={rank}: there are 1 to {_MOST_PROCESSES:,} processes, and the "
            "ranks are 0 to --num_processes − 1."
        )
    return Place(address, number, rank)


def is_launched() -> bool:
    """Whether the environment is that of one of several processes that a launcher started."""

    def several(variable: str) -> bool:
        return os.environ.get(variable, "") not in ("", "0", "1")

    slurm = several("SLURM_STEP_NUM_TASKS")  # of srun; a script of sbatch is one process, whatever SLURM_NTASKS says
    mpi = several("OMPI_COMM_WORLD_SIZE")
    kubernetes = "JOB_COMPLETION_INDEX" in os.environ and "KUBERNETES_SERVICE_HOST" in os.environ
    tpus = "," in os.environ.get("TPU_WORKER_HOSTNAMES", "") or "MEGASCALE_COORDINATOR_ADDRESS" in os.environ
    return slurm or mpi or kubernetes or tpus


def find_place(*, timeout_s: int) -> Place:
    """The place of this process, as jax detects it.

    This host must know the name of rank 0's host within `timeout_s` seconds.
    """
    from jax._src.clusters import ClusterEnv  # jax.distributed.initialize detects too, but connects at once

    try:
        found = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, timeout_s)
    except (RuntimeError, ValueError, OSError, KeyError) as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DeviceError(f"jax cannot find the processes of the run: {first_line}. {_REMEDY}") from error
    address, number, rank, local_devices = found
    if address is None or number is None or rank is None:
        raise DeviceError(f"jax does not know the launcher of this process. {_REMEDY}")
    alone = _processes_on_host() == 1
    return Place(address, number, rank, None if alone or local_devices is None else list(local_devices))


_REMEDY = "Give --coordinator_address, --num_processes and --process_id to every process."


def _processes_on_host() -> int | None:
    """How many processes of the run this host has; None where the launcher does not say."""
    slurm = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")  # as in 8(x2),4: eight on two hosts, four on one
    counts = {int(each.partition("(")[0]) for each in slurm.split(",") if each.partition("(")[0].isdecimal()}
    if len(counts) == 1:
        return counts.pop()
    mpi = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "")
    return int(mpi) if mpi.isdecimal() else None
