"""The scripts run with stand-ins for `srun`, `mpirun` and `ssh`: what reaches each process, and how all end.

The stand-ins start the processes on this machine. A process is a stand-in too, in place of Python (`--python`): it
writes its command line and what it sees of its environment to a file, and ends as the test says.
"""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from fiddlex.launch.supervisor import MAX_RESTARTS
from tests.programs import call

TASK = f"""#!{sys.executable}
import json, os, pathlib, signal, sys, time

folder = pathlib.Path(os.environ["FOLDER"])
rank = next((word[13:] for word in sys.argv if word.startswith("--process_id=")), os.environ.get("SLURM_PROCID"))

def stop(number, frame):
    (folder / f"stopped-{{rank}}").write_text(str(number))
    time.sleep(0.3)  # saves
    sys.exit(143)

signal.signal(signal.SIGTERM, stop)
names = "VALUE", "JAX_LOCAL_DEVICE_IDS"
facts = {{"argv": sys.argv[1:], "environment": {{name: os.environ.get(name) for name in names}}, "pid": os.getpid()}}
(folder / f"{{rank}}.tmp").write_text(json.dumps(facts))
(folder / f"{{rank}}.tmp").rename(folder / f"task-{{rank}}")
status = os.environ.get(f"STATUS_{{rank}}", os.environ.get("STATUS", "0"))
if rank == "0" and "LEAVES" in os.environ:
    pathlib.Path(os.environ["FIDDLEX_STATUS_FILE"]).write_text(os.environ["LEAVES"] + "\\n")
while status == "runs" or len(list(folder.glob("task-*"))) < 2:
    time.sleep(0.02)
sys.exit(int(status))
"""
# Starts two tasks, as Slurm would, and ends with the highest status.
SRUN = f"""#!{sys.executable}
import os, pathlib, subprocess, sys

flags = [word for word in sys.argv[1:] if word.startswith("--")]
command = sys.argv[1 + next(i for i, word in enumerate(sys.argv[1:]) if not word.startswith("--")):]
running = [subprocess.Popen(command, env=os.environ | {{"SLURM_PROCID": str(rank)}}) for rank in range(2)]
sys.exit(max(each.wait() for each in running))
"""
# Starts as many processes as -np says, each in a process group to which it passes SIGUSR1 on.
MPIRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys

at = sys.argv.index("bash")
number = int(sys.argv[sys.argv.index("-np") + 1])
running = [
    subprocess.Popen(sys.argv[at:], env=os.environ | {{"OMPI_COMM_WORLD_RANK": str(rank)}}, process_group=0)
    for rank in range(number)
]
signal.signal(signal.SIGUSR1, lambda *_: [os.killpg(each.pid, signal.SIGUSR1) for each in running])
sys.exit(max(each.wait() for each in running))
"""
# The last argument is what a remote shell would read; the one before, the host.
SSH = """#!/bin/bash
while (($# > 2)); do shift; done
echo "$1" >>"$FOLDER/hosts"
if [[ $1 == unreachable ]]; then until [[ -e $FOLDER/task-0 ]]; do /bin/sleep 0.1; done; exit 255; fi
exec sh -c "$2"
"""
SCONTROL = '#!/bin/bash\necho "$@" >>"$FOLDER/scontrol"\n'
SQUEUE = '#!/bin/bash\necho "$STATE"\n'
PROGRAMS = {"srun": SRUN, "mpirun": MPIRUN, "ssh": SSH, "scontrol": SCONTROL, "squeue": SQUEUE, "a task": TASK}
PROGRAMS["sleep"] = '#!/bin/bash\necho "$@" >>"$FOLDER/slept"\nexec /bin/sleep 1\n'  # for mpi: shorter than 10 s
ODD = 'text:/it\'s "$HOME" `x` $(x) \\ \n*?{a,b} & ; # ü'
KINDS = {
    "slurm": ["slurm"],
    "mpi": ["mpi", "--hosts=node0,node1"],
    "ssh": ["ssh", "--hosts=node0,me@node1"],
}


class Script:
    """A script that runs; `folder` holds what its processes wrote."""

    def __init__(self, process: subprocess.Popen[bytes], folder: pathlib.Path):
        self.process, self.folder = process, folder

    def tasks(self) -> list[dict[str, Any]]:
        """What both tasks have written; waits for it."""
        return [json.loads(self.wait_for(f"task-{rank}")) for rank in range(2)]

    def wait_for(self, name: str) -> str:
        deadline = time.monotonic() + 20
        while not (self.folder / name).exists():
            assert time.monotonic() < deadline, f"no {name}"
            time.sleep(0.02)
        return (self.folder / name).read_text()

    def stopped(self) -> set[str]:
        """The ranks that got SIGTERM."""
        return {path.name[-1] for path in self.folder.glob("stopped-*")}


Start = Callable[..., contextlib.AbstractContextManager[Script]]


@pytest.fixture
def start(tmp_path: pathlib.Path) -> Start:
    """Starts the script of a kind of launcher."""
    folder, programs = tmp_path / "folder", tmp_path / "programs"
    folder.mkdir()
    programs.mkdir()
    for name, text in PROGRAMS.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)

    @contextlib.contextmanager
    def started(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Iterator[Script]:
        run = ["--config=gpt_tiny", "--topology=h100", "--num_devices=8", "--devices_per_host=4"]
        run += [f"--workdir={folder}"]
        words = [*arguments, *run, f"--config.data.source={ODD}", f"--env=VALUE={ODD}", "--grace_s=1"]
        script = tmp_path / "script"
        call("launch", *words, f"--python={programs / 'a task'}", f"--write={script}")
        variables = {"PATH": f"{programs}:{os.environ['PATH']}", "FOLDER": str(folder), "SLURM_JOB_ID": "7"}
        with open(folder / "stderr", "w", encoding="utf-8") as stderr:
            process = subprocess.Popen([script], env=os.environ | variables | dict(environment or {}), stderr=stderr)
        try:
            yield Script(process, folder)
        finally:
            process.kill()
            process.wait()
            for path in folder.glob("task-*"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(json.loads(path.read_text())["pid"], signal.SIGKILL)

    return started


@pytest.mark.parametrize("kind", KINDS)
def test_each_process_gets_its_command_and_environment(kind: str, start: Start) -> None:
    with start(KINDS[kind]) as script:
        assert script.process.wait(20) == 0, (script.folder / "stderr").read_text()
        tasks = script.tasks()
    flags = [f"--max_restarts={MAX_RESTARTS}"] + ["--devices_per_process=4"] * (kind != "ssh")
    train = ["train", "--config=gpt_tiny", f"--workdir={script.folder}", f"--config.data.source={ODD}"]
    command = ["-P", "-m", "fiddlex", "launch", "task", *flags, "--", *train]
    for rank, task in enumerate(tasks):
        places = ["--coordinator_address=node0:12345", "--num_processes=2", f"--process_id={rank}"]
        assert task["argv"] == [*command, *(places if kind != "slurm" else [])]
        assert task["environment"]["VALUE"] == ODD
        assert task["environment"]["JAX_LOCAL_DEVICE_IDS"] == ("0,1,2,3" if kind == "ssh" else None)
    if kind == "ssh":
        assert sorted((script.folder / "hosts").read_text().splitlines()) == ["me@node1", "node0"]


@pytest.mark.parametrize("kind", ["mpi", "ssh"])
def test_a_notice_reaches_all_tasks_and_their_status_comes_back(kind: str, start: Start) -> None:
    with start(KINDS[kind], {"STATUS": "runs"}) as script:
        script.tasks()
        script.process.send_signal(signal.SIGTERM)
        assert script.process.wait(20) == 143
        assert script.stopped() == {"0", "1"}
    if kind == "mpi":  # the processes wait for each other before mpirun learns of their status
        assert (script.folder / "slept").read_text().splitlines() == ["10", "10"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_status_of_a_task_that_fails_comes_back(kind: str, start: Start) -> None:
    with start(KINDS[kind], {"STATUS_1": "3"}) as script:
        assert script.process.wait(20) == 3


@pytest.mark.parametrize(
    ("status", "state", "requeued"),
    [
        ("143", "RUNNING", True),
        ("138", "RUNNING", True),
        ("140", "RUNNING", True),
        ("143", "COMPLETING", False),
        ("130", "RUNNING", False),
        ("1", "RUNNING", False),
        ("0", "RUNNING", False),
    ],
)
def test_slurm_requeues_a_job_that_has_saved(status: str, state: str, requeued: bool, start: Start) -> None:
    with start(["slurm"], {"STATUS": status, "STATE": state}) as script:
        assert script.process.wait(20) == int(status)
    asked = script.folder / "scontrol"
    assert asked.exists() == requeued
    if requeued:
        assert asked.read_text() == "requeue 7\n"


@pytest.mark.parametrize(("left", "requeued"), [("143", True), ("0", False), ("1", False)])
def test_slurm_goes_by_the_status_of_the_run(left: str, requeued: bool, start: Start) -> None:
    # srun ends with 137 when an elastic run has lost a task.
    with start(["slurm", "--elastic"], {"STATUS": "137", "LEAVES": left, "STATE": "RUNNING"}) as script:
        assert script.process.wait(20) == int(left)
    assert (script.folder / "scontrol").exists() == requeued
    assert not [*script.folder.glob("slurm-*")]


def test_slurm_requeues_a_run_of_an_array_alone(start: Start) -> None:
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"}
    with start(["slurm"], {"STATUS": "143", "STATE": "RUNNING"} | array) as script:
        assert script.process.wait(20) == 143
    assert (script.folder / "scontrol").read_text() == "requeue 7_1\n"


@pytest.mark.parametrize("status", ["1", "143"])
def test_over_ssh_all_end_when_one_ends(status: str, start: Start) -> None:
    with start(KINDS["ssh"], {"STATUS_0": "runs", "STATUS_1": status}) as script:
        assert script.process.wait(20) == int(status)
        assert script.stopped() == {"0"}
        assert f"rank 1 has ended with status {status}\n" in script.wait_for("stderr")


def test_over_ssh_an_unreachable_host_ends_the_others(start: Start) -> None:
    with start(["ssh", "--hosts=node0,unreachable"], {"STATUS": "runs"}) as script:
        assert script.process.wait(20) == 255
        assert script.stopped() == {"0"}


def test_over_ssh_the_others_of_an_elastic_run_go_on(start: Start) -> None:
    with start([*KINDS["ssh"], "--elastic"], {"STATUS_0": "runs", "STATUS_1": "1"}) as script:
        script.tasks()
        time.sleep(3)  # more than the grace, after which all would end
        assert script.process.poll() is None
        assert script.stopped() == set()


def test_over_ssh_the_tasks_of_a_killed_script_end(start: Start) -> None:
    with start(KINDS["ssh"], {"STATUS": "runs"}) as script:
        script.tasks()
        script.process.kill()
        script.wait_for("stopped-0")
        script.wait_for("stopped-1")
