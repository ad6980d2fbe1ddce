"""Job files for Open MPI: a script that starts the tasks with `mpirun`, for Open MPI 4 and 5.

jax finds its processes under Open MPI 4 only, and takes the host of `mpirun` for the first one. So each process gets
its rank from Open MPI's variable, and the address of the first host from the script. `mpirun` kills its processes a
second after SIGTERM, which is too soon to save. So the script turns SIGTERM into SIGUSR1, which `mpirun` passes on, and
each process turns that into SIGTERM for its task.
"""

from collections.abc import Sequence

from fiddlex.errors import ConfigError
from fiddlex.launch.hosts import check_hosts, coordinator_flags
from fiddlex.launch.job import Job
from fiddlex.launch.shell import HEADER, assignments, command_line

# Runs in each process. mpirun ends all processes at the first status other than 0; after a notice, when all save, each
# process waits until the others have ended too. mpirun may send the signal to a process and its children.
_PROCESS = """\
(trap "" USR1; exec "$@" --process_id="$OMPI_COMM_WORLD_RANK") & task=$!
trap "kill -TERM $task; again=1" USR1
again=1
while ((again)); do again=0; wait "$task"; status=$?; done
case $status in 129 | 130 | 143) sleep 10 ;; esac
exit "$status"
"""
_WAIT = """\
    & mpirun=$!
trap 'kill -USR1 "$mpirun"; again=1' TERM INT USR1
again=1
while ((again)); do again=0; wait "$mpirun"; status=$?; done
exit "$status"
"""


def mpi_script(job: Job, *, hosts: Sequence[str], port: int) -> str:
    """The script; the first of `hosts` has the coordinator."""
    if job.runs_on_tpus:
        raise ConfigError("launch mpi is for GPUs and CPUs. Start slices of TPUs with launch jobset or launch ssh.")
    if job.options.elastic:
        raise ConfigError("--elastic: mpirun ends all processes with the first. Use launch slurm or launch ssh.")
    check_hosts(hosts, job)
    per_host = job.options.processes_per_host
    mpirun = ["mpirun", "--host", ",".join(f"{host}:{per_host}" for host in hosts)]
    flags = ["-np", str(job.num_processes), "-N", str(per_host), "--bind-to", "none"]
    for name in job.options.environment:
        flags += ["-x", name]
    task = job.task(*job.gpu_flags, train_flags=coordinator_flags(job, hosts[0], port))
    command = command_line(mpirun, flags, ["bash", "-c", _PROCESS, "process"], task=task)
    head = HEADER.format(title=job.title, submit="bash THIS_FILE, from a host that reaches all by ssh")
    lines = [head, "set -u", *assignments(job.options.environment), f"{command} \\\n{_WAIT}"]
    return "\n".join(lines)
