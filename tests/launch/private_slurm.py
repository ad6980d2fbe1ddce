"""A real Slurm of two nodes on this machine, in a temporary folder with its own munge socket, key and ports.

It needs root, since slurmd starts the tasks, and Debian's slurmctld, slurmd, slurm-client and munge.
"""

import contextlib
import os
import pathlib
import random
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from tests.cluster.pods import free_port

T = TypeVar("T")

MISSING = os.geteuid() != 0 or not all(map(shutil.which, ("slurmctld", "slurmd", "sbatch", "munged")))
_HOST = socket.gethostname().partition(".")[0]
NODES = (_HOST, f"{_HOST}-other")  # the first is where rank 0 is, which all look up
KILL_WAIT_S, GRACE_TIME_S = 7, 3
_CONFIG = """\
ClusterName=private
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
FirstJobId={first}
MpiDefault=none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
ReturnToService=2
KillWait={kill_wait}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/%n
StateSaveLocation={folder}/state
SlurmUser=root
SlurmdUser=root
PriorityType=priority/basic
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
NodeName={nodes} NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports}] CPUs=2 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES GraceTime={grace_time} State=UP
"""


class Slurm:
    """A Slurm that runs; its commands find it by SLURM_CONF."""

    def __init__(self, folder: pathlib.Path):
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}

    def call(self, *command: str) -> str:
        """What a command of Slurm prints."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout.strip()

    def submit(self, script: pathlib.Path, *flags: str) -> str:
        """Submits a job file; returns the job's id."""
        return self.call("sbatch", "--parsable", *flags, str(script))

    def job(self, job: str) -> dict[str, str]:
        """What Slurm knows of a job: JobState, Restarts, …"""
        words = self.call("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, job: str, states: str, *, timeout_s: float = 240) -> dict[str, str]:
        """Waits for a state of a job: PENDING, RUNNING, COMPLETED …"""
        return wait_until(
            lambda: found if (found := self.job(job))["JobState"] in states.split() else {}, timeout_s=timeout_s
        )


def wait_until(happened: Callable[[], T], *, timeout_s: float = 240) -> T:
    """Waits until something is true, and returns it."""
    end_s = time.monotonic() + timeout_s
    while not (found := happened()):
        assert time.monotonic() < end_s
        time.sleep(0.2)
    return found


@contextlib.contextmanager
def private_slurm() -> Iterator[Slurm]:
    """Starts the Slurm; leaving the context ends its jobs and its daemons."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = pathlib.Path(name)
        folder.chmod(0o755)
        for each in ("state", "munge", *NODES):
            (folder / each).mkdir(mode=0o700)
        text = _CONFIG.format(
            host=_HOST,
            nodes=",".join(NODES),
            folder=folder,
            first=random.randrange(1000, 60000),  # from which jax takes its port
            controller=free_port(),
            ports=f"{free_port()},{free_port()}",
            kill_wait=KILL_WAIT_S,
            grace_time=GRACE_TIME_S,
        )
        (folder / "slurm.conf").write_text(text)
        munge = folder / "munge"
        (munge / "key").write_bytes(secrets.token_bytes(128))
        (munge / "key").chmod(0o600)
        slurm = Slurm(folder)

        def daemon(*command: str) -> None:
            with open(folder / "daemons", "a", encoding="utf-8") as log:
                process = subprocess.Popen(command, env=slurm.environment, stdout=log, stderr=log)
            stack.callback(process.wait, 30)
            stack.callback(process.terminate)

        files = [f"--{each}-file={munge / each}" for each in ("key", "pid", "seed", "log")]
        daemon("munged", "--foreground", "--force", f"--socket={folder / 'munge.socket'}", *files)
        wait_until((folder / "munge.socket").exists)
        daemon("slurmctld", "-D")
        for node in NODES:
            daemon("slurmd", "-D", "-N", node)
        try:
            wait_until(lambda: _idle(slurm) == 2, timeout_s=60)
        except AssertionError:
            raise AssertionError((folder / "daemons").read_text()[-3000:]) from None
        stack.callback(_end_jobs, slurm)
        yield slurm


def _idle(slurm: Slurm) -> int:
    command = ["sinfo", "--noheader", "--Node", "--format=%T"]
    done = subprocess.run(command, env=slurm.environment, capture_output=True, text=True, timeout=60)
    return done.stdout.split().count("idle")


def _end_jobs(slurm: Slurm) -> None:
    slurm.call("scancel", "--user=root")
    wait_until(lambda: not slurm.call("squeue", "--noheader"), timeout_s=60)
