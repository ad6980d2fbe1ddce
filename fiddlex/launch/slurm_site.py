"""How long the Slurm of this host lets a job save (its GraceTime and KillWait), for a warning."""

import re
import subprocess

_TIMEOUT_S = 10


def save_time_warning(partition: str, grace_s: int) -> str:
    """A warning where Slurm may give a job less time to save than `--grace_s`; empty where it does not, or is not here.

    An empty `partition` stands for Slurm's default one.
    """
    kill_wait = re.search(r"^KillWait\s*=\s*(\d+) sec", _shown("config"), re.MULTILINE)
    if not kill_wait or int(kill_wait[1]) >= grace_s:
        return ""
    partitions = _shown("partition", *[partition] * bool(partition)).splitlines()
    named = [line for line in partitions if partition or " Default=YES" in line]
    grace = re.search(r"PartitionName=(\S+).* GraceTime=(\d+)", "".join(named))
    preempted = f"; before it preempts one of partition {grace[1]}, GraceTime={grace[2]} s more" if grace else ""
    return (
        f"--grace_s={grace_s} holds before the time limit only. When this Slurm requeues a job or loses a node, the "
        f"job has KillWait={kill_wait[1]} s to save{preempted}. A save that takes longer is lost, and the run goes on "
        "from the checkpoint before it (train.checkpoint_every)."
    )


def _shown(what: str, *name: str) -> str:
    """What `scontrol show` prints; empty without a Slurm that answers."""
    command = ["scontrol", "--oneliner", "show", what, *name]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
