"""The hosts of a job whose processes are told where they meet."""

import re
from collections.abc import Sequence

from fiddlex.errors import ConfigError
from fiddlex.launch.job import Job
from fiddlex.terminal.readable import counted

_HOST = re.compile(r"([A-Za-z0-9_.-]+@)?[A-Za-z0-9_][A-Za-z0-9_.-]*")


def check_hosts(hosts: Sequence[str], job: Job) -> None:
    """Checks the names of a job's hosts, and that each name is there once."""
    for host in hosts:
        if not _HOST.fullmatch(host) or host.startswith("-"):
            raise ConfigError(f"--hosts: {host!r} is no name of a host. Write --hosts=host0,host1.")
        name = host.rpartition("@")[2]
        if sum(each.rpartition("@")[2] == name for each in hosts) > 1:
            raise ConfigError(f"--hosts names {name} twice. Name each host once; --processes_per_host takes several.")
    if len(hosts) != job.num_hosts:
        raise ConfigError(
            f"--hosts names {counted(len(hosts), 'host')}, and the job needs {job.num_hosts}: {job.title}. Name so "
            "many."
        )


def coordinator_flags(job: Job, host: str, port: int) -> list[str]:
    """Flags that tell each process where all meet and how many they are; its rank is still missing."""
    address = f"{host.rpartition('@')[2]}:{port}"
    return [f"--coordinator_address={address}", f"--num_processes={job.num_processes}"]
