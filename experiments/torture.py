"""Kills a run at random moments, over and over, until it is done; compares what it made with an undisturbed run.

    python -m experiments.torture [--kills=50 --semantics=sync,2bw --disk=well,slow,full,readonly --steps=400]

Each row of the table that it prints is a run of a small GPT in two processes with two fake CPU devices each, under
`fiddlex launch local`. Of the kills (SIGKILL), a third hit a process while it saves, and the others come at any moment:
at the start, while the run compiles, in a step. One in eight hits the supervisor. With `--disk`, every write to the
workdir also fails (`full`, `readonly`) or takes longer (`slow`) for some seconds in every half a minute
(`disk_faults.c`, which takes a C compiler). A run that gives up is started again, by the same command.

The run passes when every step has the loss of the undisturbed run, its final weights are the same bit for bit, and the
samples that it trained on are those of the undisturbed run, each once in an epoch.
"""

import contextlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from absl import flags

from fiddlex.data.sample_log import read_sample_log
from fiddlex.errors import DeviceError
from fiddlex.terminal.command_line import run

_KILLS = flags.DEFINE_integer("kills", 50, "of each run", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 400, "of each run", lower_bound=10)
_SEMANTICS = flags.DEFINE_list("semantics", ["sync", "2bw"], "of the runs, separated by commas")
_DISKS = flags.DEFINE_list("disk", ["well"], "well, slow, full or readonly; several separated by commas")
_EVERY_S = flags.DEFINE_float("every_s", 12.0, "seconds between two kills on average", lower_bound=0.1)
_SEED = flags.DEFINE_integer("seed", 0, "of the moments of the kills")

_SAVING_SHARE, _SUPERVISOR_SHARE = 1 / 3, 1 / 8  # of the kills
_BATCH = 8  # examples of a step
_LONGEST_S = 4 * 3600.0  # of a run
_STARTS = 400  # of the supervisor


class Row(NamedTuple):
    """What came of one run.

    Attributes:
      semantics: `pipeline.semantics`.
      disk: what the disk did.
      kills: number of processes that were killed.
      saving: how many of them while a checkpoint was being written.
      supervisors: how many of them were supervisors.
      starts: number of starts of the processes, over all supervisors.
      seconds: that the run took.
      undisturbed_s: that the undisturbed run took.
      differences: what differs from the undisturbed run; empty when nothing does.
    """

    semantics: str
    disk: str
    kills: int
    saving: int
    supervisors: int
    starts: int
    seconds: float
    undisturbed_s: float
    differences: list[str]


def command(workdir: pathlib.Path, semantics: str) -> list[str]:
    """The command line of the run."""
    fields = {
        "model.num_layers": 2,
        "model.hidden_size": 32,
        "model.seq_len": 32,
        "model.dropout": 0.1,
        "mesh.data": 1,
        "mesh.pipe": 2,
        "mesh.tensor": 2,
        "pipeline.schedule": "1f1b",
        "pipeline.num_chunks": 1,
        "pipeline.num_microbatches": 4,
        "pipeline.semantics": semantics,
        "data.source": f"text:{workdir.parents[1] / 'text.txt'}",
        "data.global_batch_size": _BATCH,
        "data.log_samples": True,
        "train.num_steps": _STEPS.value,
        "train.log_every": 1,
        "train.eval_every": 0,
        "train.sample_tokens": 0,
        "train.checkpoint_every": 5,
    }
    launch = [sys.executable, "-P", "-m", "fiddlex", "launch", "local", "--processes=2", "--devices_per_process=2"]
    train = ["--", "train", "--config=gpt_tiny", f"--workdir={workdir}"]
    return [*launch, *train, *(f"--config.{name}={value}" for name, value in fields.items())]


class Tortured:
    """A run that is killed over and over.

    Args:
      folder: an empty folder.
      semantics: `pipeline.semantics`.
      disk: what the disk does.
      chosen: chooses the moments and the victims.
    """

    def __init__(self, folder: pathlib.Path, semantics: str, disk: str, chosen: random.Random):
        self.workdir = folder / "run"
        self.kills = self.saving = self.supervisors = self.starts = 0
        self._command, self._chosen = command(self.workdir, semantics), chosen
        self._log = (folder / "log").open("w", encoding="utf-8")
        self._environment = _environment(folder, disk, self.workdir)

    def run(self, kills: int) -> None:
        """Runs it until it is done.

        Raises:
          DeviceError: when it comes to its end before it has been killed so often.
          RuntimeError: when it does not come to its end.
        """
        deadline = time.monotonic() + _LONGEST_S
        for _ in range(_STARTS):
            with subprocess.Popen(
                self._command, stderr=self._log, stdout=self._log, env=self._environment
            ) as supervisor:
                while supervisor.poll() is None and time.monotonic() < deadline:
                    if self.kills < kills:
                        self._kill_one(supervisor)
                    else:
                        time.sleep(0.2)
            if supervisor.returncode == 0 or time.monotonic() > deadline:
                break
        self._log.flush()
        text = pathlib.Path(self._log.name).read_text(encoding="utf-8")
        self.starts = text.count("Resuming from step") + text.count("Restart ")
        if self.kills < kills:
            raise DeviceError(
                f"The run ended after {self.kills} of {kills} kills, too early to show anything. Give more "
                "--steps, or a smaller --every_s."
            )
        if supervisor.returncode:
            raise RuntimeError(f"the run did not come to its end:\n{text[-3000:]}")

    def _kill_one(self, supervisor: subprocess.Popen[bytes]) -> None:
        """Waits for a moment, and kills a process."""
        saves = self._chosen.random() < _SAVING_SHARE
        end_s = time.monotonic() + self._chosen.expovariate(1 / _EVERY_S.value)
        while time.monotonic() < end_s or (saves and time.monotonic() < end_s + 30):
            if supervisor.poll() is not None:
                return
            if saves and self._is_saving():
                time.sleep(self._chosen.random() * 0.1)
                break
            time.sleep(0.005)
        victims = _children(supervisor.pid)
        if not victims or self._chosen.random() < _SUPERVISOR_SHARE:
            victims = [supervisor.pid]
        victim = self._chosen.choice(victims)
        saving = self._is_saving()
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
            self.kills += 1
            self.saving += saving
            self.supervisors += victim == supervisor.pid

    def _is_saving(self) -> bool:
        with contextlib.suppress(OSError):
            return any("tmp" in each.name for each in (self.workdir / "checkpoints").iterdir())
        return False


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(each) for each in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _environment(folder: pathlib.Path, disk: str, workdir: pathlib.Path) -> dict[str, str]:
    programs = str(folder.parent / "programs")  # shared by all runs
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": programs}
    if disk == "well":
        return environment
    if disk not in ("slow", "full", "readonly"):
        raise DeviceError(f"--disk={disk}: name well, slow, full or readonly.")
    library = folder / "disk_faults.so"
    source = pathlib.Path(__file__).with_name("disk_faults.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return environment | {"LD_PRELOAD": str(library), "DISK_FAULT": disk, "DISK_FAULT_PATH": f"{workdir}/"}


def differences(one: pathlib.Path, other: pathlib.Path) -> list[str]:
    """What differs between two finished runs: losses, weights, samples; and samples that the second has seen twice."""
    import jax

    from fiddlex.train.trainer import load_trainer

    found = []
    ours, theirs = (_losses(each) for each in (one, other))
    if ours != theirs:
        steps = [step for step, _ in {*ours} ^ {*theirs}]
        found.append(f"losses of {len(set(steps))} steps, from {min(steps)} on")
    ours_w, theirs_w = (jax.tree.leaves(load_trainer(each).weights()) for each in (one, other))
    unequal = sum(not np.array_equal(a, b) for a, b in zip(ours_w, theirs_w, strict=True))
    found += [f"{unequal} of {len(ours_w)} weights"] * (unequal > 0)
    ours_s, theirs_s = (read_sample_log(each, batch_size=_BATCH) for each in (one, other))
    if ours_s != theirs_s:
        found.append(f"samples of {sum(ours_s.get(step) != theirs_s[step] for step in theirs_s)} steps")
    samples = [(each.source, each.number, each.epoch) for step in theirs_s.values() for each in step]
    return found + [f"{len(samples) - len(set(samples))} samples seen twice"] * (len(set(samples)) < len(samples))


def _losses(workdir: pathlib.Path) -> list[tuple[int, float]]:
    records = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [(record["step"], record["loss"]) for record in records if "loss" in record]


def rows(folder: pathlib.Path, semantics: Sequence[str], disks: Sequence[str]) -> Iterator[Row]:
    """Runs each case."""
    chosen = random.Random(_SEED.value)
    page = pathlib.Path(__file__).resolve().parents[1] / "docs" / "planner.md"
    (folder / "text.txt").write_bytes(page.read_bytes())  # which may change meanwhile
    for each in semantics:
        (quiet_folder := folder / f"{each}-undisturbed").mkdir()
        quiet = Tortured(quiet_folder, each, "well", chosen)
        start_s = time.monotonic()
        quiet.run(0)
        undisturbed_s = time.monotonic() - start_s
        for disk in disks:
            (case := folder / f"{each}-{disk}").mkdir()
            tortured = Tortured(case, each, disk, chosen)
            start_s = time.monotonic()
            tortured.run(_KILLS.value)
            seconds = time.monotonic() - start_s
            found = differences(quiet.workdir, tortured.workdir)
            counts = (tortured.kills, tortured.saving, tortured.supervisors, tortured.starts)
            yield Row(each, disk, *counts, seconds, undisturbed_s, found)


def main(argv: list[str]) -> None:
    """Prints the table, and exits with status 1 when a run differs."""
    print("| semantics | disk | kills | while saving | supervisors | starts | s | undisturbed, s | differs |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---|")
    failed = False
    with tempfile.TemporaryDirectory(prefix="fiddlex_torture") as folder:
        for row in rows(pathlib.Path(folder), _SEMANTICS.value, _DISKS.value):
            failed = failed or bool(row.differences)
            cells = [
                *row[:6],
                f"{row.seconds:.0f}",
                f"{row.undisturbed_s:.0f}",
                "; ".join(row.differences) or "nothing",
            ]
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    run(main)
