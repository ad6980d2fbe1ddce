"""The command lines of the processes that `launch local` and `launch task` start."""

import logging
import pathlib
import sys
from collections.abc import Mapping, Sequence

from fiddlex.errors import ConfigError

logger = logging.getLogger("fiddlex.launch")

PROGRAMS = ("train", "evaluate", "generate", "benchmark")  # those of which several processes make a run
# Flags of these programs that `launch` sets, and the flag of `launch` with which the user does.
_SET_BY_LOCAL = {
    "coordinator_address": "",
    "num_processes": "--processes",
    "process_id": "",
    "fake_devices": "--devices_per_process",
}
_SET_BY_BOTH = {"elastic": "--elastic"}
STATUS_FILE = "FIDDLEX_STATUS_FILE"  # the variable by which a job file asks for the run's status (`leave_status`)
_LOCAL_RANKS = ("SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")


def program_command(words: Sequence[str], *, elastic: bool) -> list[str]:
    """The command line of a program that the user names as they would start it.

    After `--` the user writes `train`, `fiddlex train`, `train.py` or `experiments/train.py`, and its flags.
    `--elastic` among these is an error, since the supervisor has to know of it.
    """
    first, *arguments = words or [""]
    if first == "fiddlex":
        first, *arguments = arguments or [""]
    path = pathlib.PurePath(first)
    name = path.stem if path.suffix == ".py" else first
    if name not in PROGRAMS:
        problem = f"{first!r} is not a program that runs in several processes" if first else "no program is named"
        raise ConfigError(
            f"{problem}. Name one of {', '.join(PROGRAMS)} after --, as in -- train --config=gpt_tiny --workdir=DIR."
        )
    if elastic and name != "train":
        raise ConfigError(f"--elastic with {name}: only train goes on with fewer processes. Leave --elastic out.")
    _refuse(_SET_BY_BOTH, arguments)
    return [sys.executable, "-P", "-m", "fiddlex", name, *arguments, *["--elastic"] * elastic]


def local_commands(
    command: Sequence[str], *, num_processes: int, devices_per_process: int, port: int
) -> list[list[str]]:
    """The command lines, by rank, of processes on this machine that meet at `port` and have fake CPU devices."""
    _refuse(_SET_BY_LOCAL, command)
    shared = [f"--coordinator_address=localhost:{port}", f"--num_processes={num_processes}"]
    last = f"--fake_devices={devices_per_process}"
    return [[*command, *shared, f"--process_id={rank}", last] for rank in range(num_processes)]


def _refuse(flags: Mapping[str, str], arguments: Sequence[str]) -> None:
    """Refuses flags of a program that `launch` sets; `flags` has the flag of `launch` with which the user does."""
    given = {argument.partition("=")[0].lstrip("-") for argument in arguments if argument.startswith("-")}
    for name, instead in flags.items():
        if given & {name, f"no{name}"}:
            remedy = f"Put {instead} before -- instead." if instead else "Leave it out."
            raise ConfigError(f"--{name} after --: launch gives the program this flag. {remedy}")


def flag_value(flag: str, arguments: Sequence[str]) -> str | None:
    """The value that a command line gives last to `flag`, such as `workdir`; None where it gives none."""
    found = None
    for argument, following in zip(arguments, [*arguments[1:], None], strict=True):
        name, equals, value = argument.partition("=")
        if name in (f"--{flag}", f"-{flag}"):
            found = value if equals else following
    return found


def local_device_ids(devices_per_process: int, environment: Mapping[str, str]) -> str:
    """JAX_LOCAL_DEVICE_IDS: the GPUs of its host that this process takes, by its rank among the host's processes.

    Without this, jax gives each process under Slurm and Open MPI one GPU.
    """
    name = next((name for name in _LOCAL_RANKS if name in environment), "")
    rank = environment[name] if name else "0"
    if not (rank.isascii() and rank.isdecimal()):
        raise ConfigError(f"{name}={rank!r} is no rank among the processes of a host. Unset this variable.")
    first = int(rank) * devices_per_process
    return ",".join(map(str, range(first, first + devices_per_process)))


def leave_status(status: int, environment: Mapping[str, str]) -> None:
    """Writes how the run ended to the file that a job file asks for; rank 0's task does, which is always there."""
    if STATUS_FILE in environment and environment.get("SLURM_PROCID") == "0":
        try:
            pathlib.Path(environment[STATUS_FILE]).write_text(f"{status}\n")
        except OSError as error:  # the job file goes by the launcher's own status then
            logger.warning("%s cannot be written: %s", environment[STATUS_FILE], error.strerror)
