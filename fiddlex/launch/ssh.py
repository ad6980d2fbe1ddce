"""Job files for ssh: a script that starts a task on each host, and ends all when one ends.

Each task ends with its connection: on its host it gets SIGTERM when its standard input ends. All tasks' standard inputs
are one pipe, to which nobody writes. The script holds its other end and closes it when it gets SIGTERM, SIGINT or
SIGUSR1, and when a task has ended; and when the script is killed, the pipe is closed too.
"""

import shlex
from collections.abc import Sequence

from fiddlex.launch.hosts import check_hosts, coordinator_flags
from fiddlex.launch.job import Job
from fiddlex.launch.shell import HEADER

# Runs on each host, in bash: starts the task, and ends it when the standard input ends. Has no single quotes.
_REMOTE = """\
grace=$0
exec 3<&0
"$@" </dev/null 3<&- & task=$!
{
    while read -r _; do :; done <&3
    kill -TERM "$task"
    sleep "$grace" 3<&-
    kill -KILL "$task"
} >/dev/null 2>&1 & watch=$!
wait "$task"; status=$?
kill "$watch"
exit "$status"
"""
_START = """
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
mkfifo "$folder/hold" "$folder/ended"
exec 9<>"$folder/hold" 8<>"$folder/ended" # 9 is open as long as the tasks shall run; 8 tells how they end

start() { # rank, host, further variables
    {
        ssh -o BatchMode=yes -o ConnectTimeout=30 -o ServerAliveInterval=15 -o ServerAliveCountMax=4 "$2" \\
            "env $environment ${3:-} bash -c '$remote' $grace $task --process_id=$1" <"$folder/hold" 8>&-
        echo "$1 $?" >&8
    } 9>&- &
}

end_all() { exec 9>&-; }
trap end_all TERM INT HUP USR1
"""
_WAIT = """
status=0 running={number}{deadline}
while ((running)); do
    if read -r -t 1 rank code <&8; then
        running=$((running - 1))
        if ((code)); then echo "rank $rank has ended with status $code" >&2; fi
        {keep}
{then}    fi
{later}done
exit "$status"
"""
_THEN = """\
        case $code in
            0 | 129 | 130 | 138 | 143) deadline=${deadline:-$((SECONDS + grace))} ;; # the others end by themselves
            *) end_all ;;
        esac
"""
_LATER = """\
    if [[ -n $deadline ]] && ((SECONDS >= deadline)); then end_all; fi
"""


def ssh_script(job: Job, *, hosts: Sequence[str], port: int) -> str:
    """The script; the first of `hosts`, named as ssh takes them, has the coordinator."""
    check_hosts(hosts, job)
    options, size = job.options, job.devices_per_process
    task = job.task(train_flags=coordinator_flags(job, hosts[0], port))
    variables = shlex.join(f"{name}={value}" for name, value in options.environment.items())
    lines = [
        HEADER.format(title=job.title, submit="bash THIS_FILE, from a host that reaches all by ssh without a password"),
        "set -u",
        f"grace={options.grace_s} # seconds to save in",
        f"environment={shlex.quote(variables)}",
        f"task={shlex.quote(shlex.join(task))}",
        f"remote='{_REMOTE}'",
        _START,
    ]
    for rank in range(job.num_processes):
        index, local = divmod(rank, options.processes_per_host)
        devices = f" {_devices(local * size, size)}" if job.runs_on_gpus else ""
        lines.append(f"start {rank} {hosts[index]}{devices}")
    # The others of an elastic run go on when one ends, and rank 0, which is always there, tells how the run ended.
    ends = {"deadline": "", "keep": "if ((rank == 0)); then status=$code; fi", "then": "", "later": ""}
    if not options.elastic:
        keep = "if ((status == 0)); then status=$code; fi"
        ends = {"deadline": " deadline=", "keep": keep, "then": _THEN, "later": _LATER}
    return "\n".join(lines) + "\n" + _WAIT.format(number=job.num_processes, **ends)


def _devices(first: int, number: int) -> str:
    return f"JAX_LOCAL_DEVICE_IDS={','.join(map(str, range(first, first + number)))}"
