"""Job files for Slurm: a script for `sbatch` that starts the tasks with one `srun`.

jax finds the processes by the variables of `srun`. The supervisor in each task restarts the program; Slurm starts the
job again when it was preempted, lost a node or came near its time limit. Then SIGTERM reaches the tasks, or SIGUSR1
where `sbatch --signal` says so; all of them save at one step and end with status 143 or 138, and the script asks Slurm
to requeue the job. The task of rank 0 leaves its status in a file of this job and restart, from which the script learns
that the run has saved.
"""

import dataclasses
import re

from fiddlex.errors import ConfigError
from fiddlex.launch.job import Job
from fiddlex.launch.programs import STATUS_FILE
from fiddlex.launch.shell import HEADER, assignments, command_line

_PLAIN = re.compile(r"[A-Za-z0-9/._+,:@=-]+")  # what sbatch reads literally in an #SBATCH line
_TIME = re.compile(r"[0-9]{1,9}(:[0-9]{1,9}){0,2}|[0-9]{1,9}-[0-9]{1,9}(:[0-9]{1,9}){0,2}|UNLIMITED|INFINITE", re.I)
_EARLIEST_S = 60  # by so much Slurm may send the signal of `sbatch --signal` earlier (its manual)
# A job that scancel ends is not RUNNING any more when its tasks have ended, and stays cancelled.
_REQUEUE = """\
status=$?
# The run's own status, from the task of rank 0: that of srun also counts tasks that an elastic run has lost.
if [[ -s $FIDDLEX_STATUS_FILE ]]; then status=$(<"$FIDDLEX_STATUS_FILE"); fi
rm -f "$FIDDLEX_STATUS_FILE"
job=${SLURM_ARRAY_TASK_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID} # the other id may be that of a whole array
job=${job:-$SLURM_JOB_ID}
if [[ $status == @(138|140|143) && $(squeue --noheader --job="$job" --format=%T) == RUNNING ]]; then
    scontrol requeue "$job" # the run has saved, because of a preemption or the time limit
fi
exit "$status"
"""


@dataclasses.dataclass(frozen=True)
class SlurmOptions:
    """What Slurm alone can be told; an empty value is left to Slurm."""

    partition: str = ""
    account: str = ""
    qos: str = ""  # name of the quality of service
    time_limit: str = ""  # limit of the job's time, such as 1-00:00:00
    # processor cores of each task; None: the job has whole nodes, and each task has all their cores
    cpus_per_task: int | None = None


def slurm_script(job: Job, options: SlurmOptions) -> str:
    if job.runs_on_tpus:
        raise ConfigError("launch slurm is for GPUs and CPUs. Start slices of TPUs with launch jobset or launch ssh.")
    shared = job.options
    cpus = options.cpus_per_task
    valued = {
        "job-name": job.name,
        "nodes": job.num_hosts,
        "ntasks-per-node": shared.processes_per_host,
        "gpus-per-node": job.devices_per_process * shared.processes_per_host if job.runs_on_gpus else "",
        "cpus-per-task": cpus or "",
        "mem": "" if cpus else 0,
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "time": options.time_limit,
        "signal": f"TERM@{shared.grace_s}",
        "open-mode": "append",
        "output": f"{job.workdir.replace('%', '%%')}/slurm-%j.log",
    }
    lines = [_directive(name, str(value)) for name, value in valued.items() if value != ""]
    _check_time(options.time_limit, shared.grace_s)
    lines += ["#SBATCH --exclusive"] * (cpus is None) + ["#SBATCH --requeue"]
    lines += ["#SBATCH --no-kill"] * shared.elastic  # without it, Slurm ends and requeues a job that loses a node
    srun = [
        "srun",
        *["--no-kill"] * shared.elastic,  # that of sbatch does not reach the step
        "--kill-on-bad-exit=0",
        f"--wait={0 if shared.elastic else shared.grace_s}",  # from the end of the first task to that of the others
        f"--cpus-per-task={cpus}" if cpus else "--cpu-bind=none",
    ]
    task = job.task(*job.gpu_flags)
    head = HEADER.format(
        title=job.title, submit=f"mkdir -p {job.workdir} && sbatch THIS_FILE; Slurm writes its log there"
    )
    status_file = f"export {STATUS_FILE}={job.workdir}/slurm-$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}.status"
    body = ["set -u", *assignments(shared.environment), status_file, command_line(srun, task=task), _REQUEUE]
    return head + "\n".join(lines) + "\n\n" + "\n".join(body)


def _check_time(limit: str, grace_s: int) -> None:
    """Raises ConfigError when a job that saves `grace_s` before its limit would be told to as soon as it starts."""
    seconds = _seconds(limit)
    if 0 < seconds <= grace_s + _EARLIEST_S:
        raise ConfigError(
            f"--time_limit={limit} is {seconds} s and --grace_s={grace_s}: Slurm sends the signal to save so long "
            f"before the limit, and up to {_EARLIEST_S} s earlier: no time is left to train. Give a limit above "
            f"{grace_s + _EARLIEST_S} s, or a smaller --grace_s."
        )


def _seconds(limit: str) -> int:
    """The seconds of a limit of time as Slurm writes it; 0 where there is none."""
    days, has_days, clock = limit.rpartition("-")
    if not clock.replace(":", "").isdigit():
        return 0
    numbers = [int(each) for each in clock.split(":")]
    if not has_days and len(numbers) < 3:  # minutes, minutes:seconds; else hours come first
        numbers.insert(0, 0)
    hours, minutes, seconds = (*numbers, 0, 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _directive(name: str, value: str) -> str:
    pattern = _TIME if name == "time" else _PLAIN
    if not pattern.fullmatch(value.replace("%", "") if name == "output" else value):
        rule = "an #SBATCH line may have letters, digits and /._+,:@=- only"
        if name == "time":
            rule = "a limit of time is minutes, hours:minutes:seconds, days-hours or UNLIMITED"
        flag = {"output": "--workdir", "time": "--time_limit", "job-name": "--name"}.get(name, f"--{name}")
        raise ConfigError(f"{flag}={value!r}: {rule}. Choose another.")
    return f"#SBATCH --{name}={value}"
