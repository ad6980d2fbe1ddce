"""Job files of `launch slurm` under a real Slurm: what stops a run, starts it again, and changes none of its losses."""

import pathlib
import subprocess
from collections.abc import Iterator

import numpy as np
import pytest

from fiddlex.config import Config
from fiddlex.config.overrides import replaced
from fiddlex.launch.slurm_site import save_time_warning
from fiddlex.train import loop
from tests.cluster.test_processes import as_flags, make_config
from tests.launch.private_slurm import GRACE_TIME_S, KILL_WAIT_S, MISSING, NODES, Slurm, private_slurm, wait_until
from tests.launch.test_supervised_runs import losses, newest_loss, wait_for_step
from tests.programs import call

pytestmark = [pytest.mark.long, pytest.mark.skipif(MISSING, reason="needs root, and Slurm and munge of Debian")]
STEPS = 600


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with private_slurm() as running:  # some 20 s
        yield running


def make_job(folder: pathlib.Path, config: Config, config_file: pathlib.Path, *flags: str) -> pathlib.Path:
    """Writes the job file of a run whose workdir is `folder`, with two CPU devices at most for each host."""
    folder.mkdir()
    job = folder / "job.sbatch"
    run = [f"--config={config_file}", *as_flags(config), f"--workdir={folder}", f"--write={job}"]
    call("launch", "slurm", *run, f"--num_devices={config.mesh.num_devices}", "--cpus_per_task=1", *flags)
    return job


def many_steps(config: Config, mesh: str) -> Config:
    fields = {"train.num_steps": STEPS, "train.checkpoint_every": 10, "train.eval_every": 0, "model.dropout": 0.1}
    return make_config(config, mesh, fields)


def check_losses(config: Config, folder: pathlib.Path, one: pathlib.Path) -> None:
    """Compares a run's losses with those of one device that nothing disturbed."""
    loop.train(replaced(config, {"mesh.data": 1}), one)
    ours, theirs = losses(folder), losses(one)
    assert list(ours) == list(theirs)
    np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=1e-5)


def wait_for_text(path: pathlib.Path, text: str) -> None:
    wait_until(lambda: text in path.read_text())


def set_node(slurm: Slurm, node: str, state: str) -> None:
    slurm.call("scontrol", "update", f"NodeName={node}", f"State={state}", "Reason=test")


def bring_back(slurm: Slurm, node: str) -> None:
    """Brings a node back; Slurm does it itself where ReturnToService says so, and then refuses."""

    def is_back() -> bool:
        if "down" not in (state := slurm.call("sinfo", "--noheader", f"--nodes={node}", "--format=%T")):
            return True
        subprocess.run(["scontrol", "update", f"NodeName={node}", "State=RESUME"], env=slurm.environment, check=False)
        return "down" not in state

    wait_until(is_back, timeout_s=60)


def wait_for_restart(slurm: Slurm, job: str, number: int) -> None:
    """Waits until Slurm has started a job again so often, which it would do two minutes after it requeued it."""
    wait_until(lambda: slurm.job(job)["Restarts"] == str(number))

    def runs() -> bool:
        if (state := slurm.job(job)["JobState"]) == "PENDING":
            command = ["scontrol", "update", f"JobId={job}", "StartTime=now"]
            subprocess.run(command, env=slurm.environment, check=False)
        return state == "RUNNING"

    wait_until(runs)


def test_an_elastic_run_loses_a_node_and_gets_it_back(
    slurm: Slurm, tiny_config: Config, tmp_path: pathlib.Path, config_file: pathlib.Path
) -> None:
    config, run = many_steps(tiny_config, "2x1x1"), tmp_path / "run"
    flags = ["--elastic", "--fake_devices=1", "--join_timeout_s=5", "--grace_s=60"]
    job = slurm.submit(make_job(run, config, config_file, *flags))
    wait_for_step(run, 20)
    set_node(slurm, NODES[1], "DOWN")
    wait_for_text(run / f"slurm-{job}.log", "the run goes on with 1")
    wait_for_step(run, newest_loss(run) + 30)
    slurm.call("scancel", "--signal=TERM", job)
    wait_until(lambda: slurm.job(job)["Restarts"] == "1")
    assert newest_loss(run) < STEPS
    bring_back(slurm, NODES[1])
    wait_for_restart(slurm, job, 1)
    slurm.wait(job, "COMPLETED")
    log = (run / f"slurm-{job}.log").read_text()
    meshes = [line.split("data=")[1][0] for line in log.splitlines() if line.startswith("gpt with")]
    assert meshes == ["2", "1", "2"]
    check_losses(config, run, tmp_path / "one")


def test_a_run_that_is_stopped_requeued_and_loses_a_node(
    slurm: Slurm, tiny_config: Config, tmp_path: pathlib.Path, config_file: pathlib.Path
) -> None:
    config, run = many_steps(tiny_config, "2x1x1"), tmp_path / "run"
    job = slurm.submit(make_job(run, config, config_file, "--fake_devices=1", "--grace_s=60"))
    stops = (
        lambda: slurm.call("scancel", "--signal=TERM", job),
        lambda: slurm.call("scontrol", "requeue", job),
        lambda: set_node(slurm, NODES[1], "DOWN"),
    )
    for number, stop in enumerate(stops, 1):
        wait_for_step(run, newest_loss(run) + 30)
        stop()
        slurm.wait(job, "PENDING")
        bring_back(slurm, NODES[1])
        wait_for_restart(slurm, job, number)
    slurm.wait(job, "COMPLETED")
    check_losses(config, run, tmp_path / "one")


def test_an_array_of_two_runs_that_reach_their_time_limit(
    slurm: Slurm, tiny_config: Config, tmp_path: pathlib.Path, config_file: pathlib.Path
) -> None:
    config = replaced(many_steps(tiny_config, "1x1x1"), {"train.num_steps": 100_000, "train.log_every": 20})
    runs = [tmp_path / f"run-{index}" for index in range(2)]
    for run in runs:
        make_job(run, config, config_file, "--fake_devices=1")
    array = tmp_path / "array"
    array.write_text(f"#!/bin/bash\nexec bash {tmp_path}/run-$SLURM_ARRAY_TASK_ID/job.sbatch\n")
    flags = ["--array=0-1", "--nodes=1", "--ntasks=1", "--cpus-per-task=1", "--time=60", "--signal=TERM@60"]
    job = slurm.submit(array, *flags, "--requeue", "--open-mode=append", f"--output={tmp_path}/%a.log")
    for run in runs:
        wait_for_step(run, 20)
    command = ["timeout", "10", "sattach", f"{job}_0.0"]
    attached = subprocess.run(command, env=slurm.environment, capture_output=True, text=True)
    assert "step " in attached.stdout + attached.stderr
    for index in range(2):
        hours, minutes, _ = map(int, slurm.job(f"{job}_{index}")["RunTime"].split(":"))
        limit = f"TimeLimit={60 * hours + minutes + 2}"
        slurm.call("scontrol", "update", f"JobId={job}_{index}", limit)
    for index, log in enumerate([tmp_path / "0.log", tmp_path / "1.log"]):
        wait_for_restart(slurm, f"{job}_{index}", 1)
        wait_for_text(log, "Resuming from step")
        assert "Stopped by SIGTERM at step" in log.read_text()
    slurm.call("scancel", job)
    for index in range(2):
        slurm.wait(f"{job}_{index}", "CANCELLED")


def test_the_time_that_slurm_gives_is_told(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    told = save_time_warning("", KILL_WAIT_S + 1)
    assert f"job has KillWait={KILL_WAIT_S} s to save; before it preempts one" in told
    assert f" of partition main, GraceTime={GRACE_TIME_S} s more." in told
    assert save_time_warning("main", KILL_WAIT_S + 1) == told
    assert save_time_warning("", KILL_WAIT_S) == ""
