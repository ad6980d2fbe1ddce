"""What each fault does to a run of several processes: in how many seconds all have ended, and what they say.

    python -m experiments.faults [--processes=4 --fake_devices=2 --timeout_s=6]

Each row is a run of its own of a small GPT on fake CPU devices, which is disturbed once it trains. Prints a Markdown
table. "s" counts from the fault to the end of the last process that can still end.
"""

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from absl import flags

from fiddlex.terminal.command_line import run

_PROCESSES = flags.DEFINE_integer("processes", 4, "processes of each run", lower_bound=2)
_DEVICES = flags.DEFINE_integer("fake_devices", 2, "devices of each process", lower_bound=1)
_TIMEOUT = flags.DEFINE_integer("timeout_s", 6, "train.peer_timeout_s of the runs", lower_bound=5)

_STEPS_BEFORE = 5  # training records before the fault
_LONGEST_S = 300.0

Fault = Callable[["Pod"], None]


class Row(NamedTuple):
    """A row of the table.

    Attributes:
      fault: what was done.
      seconds: from the fault to the end of the processes.
      statuses: of the processes that ended, by rank.
      said: the lines of the error.
    """

    fault: str
    seconds: float
    statuses: dict[int, int]
    said: list[str]


class Pod:
    """The processes of a run on this machine.

    Attributes:
      processes: by rank.
      workdir: the run's directory.
    """

    def __init__(self, folder: pathlib.Path, *, extra: tuple[str, ...] = (), ranks: range | None = None):
        number = _PROCESSES.value
        self.workdir, self._logs = folder / "run", folder
        with socket.create_server(("", 0)) as server:
            address = f"localhost:{server.getsockname()[1]}"
        data, tensor = number, _DEVICES.value
        command = [sys.executable, "-P", "-m", "fiddlex", "train", "--config=gpt_tiny", f"--workdir={self.workdir}"]
        command += [f"--config.mesh.data={data}", "--config.mesh.pipe=1", f"--config.mesh.tensor={tensor}"]
        command += ["--config.pipeline.schedule=1f1b", "--config.pipeline.num_chunks=1", "--config.train.log_every=1"]
        command += ["--config.train.num_steps=1000000", "--config.train.eval_every=0", "--config.model.hidden_size=64"]
        command += [f"--config.train.peer_timeout_s={_TIMEOUT.value}", f"--coordinator_address={address}", *extra]
        command += [f"--num_processes={number}", f"--fake_devices={_DEVICES.value}"]
        self.processes = {
            rank: subprocess.Popen(
                [*command, f"--process_id={rank}"],
                stdout=subprocess.DEVNULL,
                stderr=(folder / f"{rank}.log").open("w"),
                env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "programs")},
            )
            for rank in ranks or range(number)
        }

    def wait_for_steps(self, number: int = _STEPS_BEFORE) -> None:
        """Waits until the run has written so many training records."""
        deadline = time.monotonic() + _LONGEST_S
        while True:
            with contextlib.suppress(OSError):
                if (self.workdir / "metrics.jsonl").read_text().count("\n") >= number:
                    return
            if time.monotonic() > deadline or any(each.poll() is not None for each in self.processes.values()):
                raise RuntimeError("\n".join(self.said()) or "the run does not train")
            time.sleep(0.05)

    def said(self) -> list[str]:
        """The lines that the processes wrote, without those of a run that trains."""
        lines = [line for rank in self.processes for line in (self._logs / f"{rank}.log").read_text().splitlines()]
        quiet = re.compile(r"step |gpt with|stdlib:|The platform|Compiled|Rank \d+ has|Goodput|SIG\w+ to rank")
        return [line for line in lines if not quiet.match(line)]

    def ended(self, fault: str, *, without: set[int] | None = None) -> Row:
        """Waits for the end of the processes, except those that cannot end."""
        start_s = time.monotonic()
        statuses = {
            rank: process.wait(timeout=_LONGEST_S)
            for rank, process in self.processes.items()
            if rank not in (without or set())
        }
        return Row(fault, time.monotonic() - start_s, statuses, self.said())

    def kill(self) -> None:
        """Kills what still runs."""
        for process in self.processes.values():
            process.kill()
            process.wait()


def rows() -> Iterator[Row]:
    """Runs each case."""
    ranks = sorted({0, 1, _PROCESSES.value - 1})
    for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM):
        for rank in ranks:
            yield _disturbed(f"{number.name} of rank {rank}", number, rank)
    yield _disturbed("SIGKILL of rank 1 while it saves", signal.SIGKILL, 1, ("--config.train.checkpoint_every=1",))
    yield _without_coordinator()
    yield _alone()


@contextlib.contextmanager
def _folder() -> Iterator[pathlib.Path]:
    """An empty folder for a run, beside the compiled programs, which all runs share."""
    root = pathlib.Path(tempfile.gettempdir()) / "fiddlex_faults"
    root.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as folder:
        yield pathlib.Path(folder)


def _disturbed(fault: str, number: signal.Signals, rank: int, extra: tuple[str, ...] = ()) -> Row:
    with _folder() as folder:
        pod = Pod(folder, extra=extra)
        try:
            pod.wait_for_steps()
            pod.processes[rank].send_signal(number)
            return pod.ended(fault, without={rank} if number == signal.SIGSTOP else None)
        finally:
            pod.kill()


def _without_coordinator() -> Row:
    """The coordinator itself is killed, as when the host of rank 0 is lost."""
    with _folder() as folder:
        pod = Pod(folder)
        try:
            pod.wait_for_steps()
            first = pod.processes[0].pid
            for child in pathlib.Path(f"/proc/{first}/task/{first}/children").read_text().split():
                if b"coordinator.py" in pathlib.Path(f"/proc/{child}/cmdline").read_bytes():
                    os.kill(int(child), signal.SIGKILL)
            return pod.ended("SIGKILL of the coordinator")
        finally:
            pod.kill()


def _alone() -> Row:
    """Rank 1 starts, and rank 0 never does."""
    with _folder() as folder:
        pod = Pod(folder, extra=("--join_timeout_s=5",), ranks=range(1, 2))
        try:
            return pod.ended("rank 0 does not start (--join_timeout_s=5)")
        finally:
            pod.kill()


def main(argv: list[str]) -> None:
    """Prints the table."""
    print("| fault | s | statuses | said |\n|---|---:|---|---|")
    for row in rows():
        statuses = ", ".join(map(str, sorted(set(row.statuses.values()))))
        said = "; ".join(json.dumps(line)[1:-1] for line in row.said) or "nothing"
        print(f"| {row.fault} | {row.seconds:.1f} | {statuses} | {said} |", flush=True)


if __name__ == "__main__":
    run(main)
