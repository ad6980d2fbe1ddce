"""Runs of several processes do what a run of one process does, and end together with one message."""

import contextlib
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from fiddlex.cluster.launchers import is_launched
from fiddlex.config import Config
from fiddlex.config.overrides import replaced
from fiddlex.train import loop
from fiddlex.train.run.checkpoints.file_digests import read_list
from fiddlex.train.run.checkpoints.inventory import finished, verify
from fiddlex.train.trainer import load_trainer
from tests.cluster.pods import free_port, pod, run_pod
from tests.programs import EXPERIMENTS, Running, call, started

CHUNKS = {"pipeline.schedule": "interleaved_1f1b", "pipeline.num_chunks": 2, "model.num_layers": 4}
# Processes, devices of each, mesh (data, pipe, tensor), and other fields.
LAYOUTS: dict[str, tuple[int, int, str, dict[str, Any]]] = {
    "data across": (2, 2, "2x1x2", {"optimizer.zero1": True}),
    "pipe across and data within": (2, 2, "2x2x1", CHUNKS | {"mesh.outermost": "pipe", "optimizer.zero1": True}),
    "pipe across": (2, 4, "2x2x2", CHUNKS | {"optimizer.zero1": True}),
    "pipe and data across": (4, 2, "2x2x2", CHUNKS | {"pipeline.semantics": "2bw"}),
    "all across": (8, 1, "2x2x2", CHUNKS | {"model.dropout": 0.1}),
    "tensor across, sequence parallel": (4, 1, "1x1x4", {"mesh.sequence_parallel": True}),
    "BERT": (2, 4, "2x2x2", {"model.family": "bert", "model.objective": "mlm_nsp", "pipeline.semantics": "2bw"}),
}


def make_config(base: Config, mesh: str, fields: dict[str, Any]) -> Config:
    data, pipe, tensor = map(int, mesh.split("x"))
    sizes = {"mesh.data": data, "mesh.pipe": pipe, "mesh.tensor": tensor, "pipeline.num_microbatches": 2 * pipe}
    # Not AdamW, which divides gradients that are nearly zero, rounding noise, by their own size.
    run = {"optimizer.name": "sgd", "train.num_steps": 4, "train.eval_every": 2, "train.checkpoint_every": 2}
    return replaced(base, sizes | run | fields).validate()


def as_flags(config: Config) -> list[str]:
    """The fields in which a config differs from the default one."""
    default, flags = Config(), list[str]()
    for section, values in json.loads(config.to_json()).items():
        for name, value in values.items():
            if value != getattr(getattr(default, section), name):
                flags.append(f"--config.{section}.{name}={value}")
    return flags


def numbers(workdir: pathlib.Path) -> list[list[float]]:
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [[record.get(name, 0.0) for name in ("step", "loss", "grad_norm", "eval_loss")] for record in lines]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name != "data across")) for name in LAYOUTS]
)
def test_training_equals_that_of_one_process(
    name: str, tiny_config: Config, tmp_path: pathlib.Path, config_file: pathlib.Path
) -> None:
    number, devices, mesh, fields = LAYOUTS[name]
    config = make_config(tiny_config, mesh, fields)
    loop.train(config, tmp_path / "one")
    flags = [f"--config={config_file}", *as_flags(config)]
    ended = run_pod(number, devices, "train", *flags, f"--workdir={tmp_path / 'pod'}", "--format=json")
    assert [each.returncode for each in ended] == [0] * number, [each.stderr for each in ended]
    np.testing.assert_allclose(numbers(tmp_path / "pod"), numbers(tmp_path / "one"), rtol=1e-6)
    # The first process alone speaks, and its output is one JSON object.
    assert json.loads(ended[0].stdout)["step"] == 4
    assert "Done: step 4" in ended[0].stderr
    assert [(each.stdout, each.stderr) for each in ended[1:]] == [("", "")] * (number - 1)
    ours, theirs = (load_trainer(tmp_path / run).weights() for run in ("one", "pod"))
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert np.linalg.norm(one - other) <= 1e-6 * np.linalg.norm(one)
    for path in finished(tmp_path / "pod"):
        assert verify(path).whole
        folders = {name.split("/")[1] for name in read_list(path) if name.startswith("weights/ocdbt")}
        assert folders == {f"ocdbt.process_{rank}" for rank in range(number)}
        assert not list(path.glob(".*"))  # what the other processes recorded is in the list


ENDS = """
from fiddlex.cluster.process_flags import define_processes
from fiddlex.terminal.command_line import run
join = define_processes()
def main(argv):
    join()
    print("\\u2026")
run(main)
"""


def test_processes_end_quietly_where_warnings_are_errors() -> None:
    place = [f"--coordinator_address=localhost:{free_port()}", "--num_processes=2"]
    environment = os.environ | {"PYTHONWARNINGS": "error", "PYTHONIOENCODING": "ascii", "JAX_PLATFORMS": "cpu"}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", ENDS, *place, f"--process_id={rank}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    said = [each.communicate(timeout=120)[0] for each in running]
    assert [(each.returncode, text) for each, text in zip(running, said, strict=True)] == [(0, "\\u2026\n"), (0, "")]


@pytest.mark.long
def test_a_checkpoint_goes_on_in_any_number_of_processes(
    tiny_config: Config, tmp_path: pathlib.Path, config_file: pathlib.Path
) -> None:
    config = make_config(tiny_config, "2x2x2", CHUNKS)
    config.optimizer.schedule = "constant"
    whole = replaced(config, {"train.num_steps": 8})
    loop.train(whole, tmp_path / "one")
    for steps, (number, devices) in zip((2, 4, 6), ((2, 4), (8, 1), (4, 2)), strict=True):
        flags = as_flags(replaced(config, {"train.num_steps": steps}))
        ended = run_pod(number, devices, "train", f"--config={config_file}", *flags, f"--workdir={tmp_path / 'parts'}")
        assert [each.returncode for each in ended] == [0] * number, [each.stderr for each in ended]
    loop.train(whole, tmp_path / "parts")
    found = {tuple(row[:1]): row for row in numbers(tmp_path / "parts") if row[1]}
    for row in numbers(tmp_path / "one"):
        if row[1]:
            np.testing.assert_allclose(found[tuple(row[:1])], row, rtol=1e-6)


@pytest.mark.long
def test_evaluation_and_generation_equal_those_of_one_process(tiny_config: Config, tmp_path: pathlib.Path) -> None:
    loop.train(make_config(tiny_config, "2x2x2", CHUNKS), tmp_path / "run")
    for program, flags in {
        "evaluate": [],
        "generate": ["--prompt=def ", "--prompt=class", "--temperature=0", "--num_tokens=30", "--format=json"],
    }.items():
        alone = json.loads(call(program, f"--workdir={tmp_path / 'run'}", *flags).stdout.splitlines()[-1])
        first, second = run_pod(2, 4, program, f"--workdir={tmp_path / 'run'}", *flags)
        assert (first.returncode, second.returncode, second.stdout) == (0, 0, ""), first.stderr
        together = json.loads(first.stdout.splitlines()[-1])
        if program == "generate":
            assert together["samples"] == alone["samples"]
        else:
            assert together["eval_loss"] == pytest.approx(alone["eval_loss"], rel=1e-6)


@pytest.mark.long
def test_a_benchmark_takes_as_many_turns_in_each_process(tiny_config: Config, config_file: pathlib.Path) -> None:
    flags = [f"--config={config_file}", *as_flags(make_config(tiny_config, "2x1x2", {}))]
    first, second = run_pod(2, 2, "benchmark", *flags, "--seconds=2", "--format=json")
    assert (first.returncode, second.returncode, second.stdout) == (0, 0, ""), first.stderr
    assert json.loads(first.stdout)["num_steps"] >= 5


BAD_DATA = """
import runpy, sys
from fiddlex.errors import DataError
from fiddlex.train.step.feed import Feed
original = Feed.train
def train(self, start_step):
    for number, batch in enumerate(original(self, start_step), start_step):
        if number >= 3:
            raise DataError("a token is outside the vocabulary")
        yield batch
if "--process_id=1" in sys.argv:
    Feed.train = train
runpy.run_path({program!r}, run_name="__main__")
"""


@pytest.mark.long
def test_bad_data_on_one_rank_ends_all(tiny_config: Config, tmp_path: pathlib.Path, config_file: pathlib.Path) -> None:
    (tmp_path / "bad.py").write_text(BAD_DATA.format(program=str(EXPERIMENTS / "train.py")))
    config = make_config(tiny_config, "2x1x2", {"train.eval_every": 0, "train.num_steps": 8})
    flags = [f"--config={config_file}", *as_flags(config), f"--workdir={tmp_path / 'pod'}"]
    with pod(2, 2, tmp_path / "bad.py", *flags) as running:
        ended = [each.wait(90) for each in running]
    assert [each.returncode for each in ended] == [2, 2], [each.stderr for each in ended]
    assert "".join(each.stderr for each in ended).count("a token is outside the vocabulary") == 1


def test_another_config_or_workdir_on_one_rank_ends_all_with_one_message(
    tiny_config: Config, tmp_path: pathlib.Path, config_file: pathlib.Path
) -> None:
    flags = [f"--config={config_file}", *as_flags(make_config(tiny_config, "2x1x2", {}))]
    pod, odd = tmp_path / "pod", tmp_path / "odd"
    changes = ["--config.train.seed=7", "--config.optimizer.learning_rate=0.5", f"--workdir={odd}"]
    ended = run_pod(2, 2, "train", *flags, f"--workdir={pod}", extra=[[], changes])
    assert [each.returncode for each in ended] == [2, 2]
    said = "".join(each.stderr for each in ended)
    assert said.count("The processes of a run must have the same workdir, config, data and versions:") == 1
    assert "train.seed is 0 on rank 0 and 7 on rank 1" in said
    assert f"optimizer.learning_rate is {tiny_config.optimizer.learning_rate} on rank 0 and 0.5 on rank 1" in said
    assert f"the workdir is '{pod}' on rank 0 and '{odd}' on rank 1" in said
    assert not pod.exists()
    assert not odd.exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_processes_that_do_not_come_are_told(
    rank: int, tiny_config: Config, tmp_path: pathlib.Path, config_file: pathlib.Path
) -> None:
    started_s, address = time.monotonic(), f"localhost:{free_port()}"
    flags = [f"--coordinator_address={address}", "--num_processes=4", f"--process_id={rank}", "--join_timeout_s=1"]
    done = call("train", f"--config={config_file}", f"--workdir={tmp_path / 'pod'}", *flags, status=1)
    assert time.monotonic() - started_s < 15
    if rank == 0:
        expected = (
            f"1 of 4 processes have joined at --coordinator_address={address} within 1 s, without the ranks 1, 2, 3"
        )
    else:
        expected = f"Process 1 of 4 did not reach --coordinator_address={address} within 1 s: Connection refused"
    assert expected in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num_processes=2"], "--num_processes without --coordinator_address and --process_id: give all three"),
        (["--coordinator_address=here", "--num_processes=2", "--process_id=0"], "=here must be HOST:PORT"),
        (["--coordinator_address=a:1", "--num_processes=2", "--process_id=2"], "the ranks are 0 to"),
    ],
)
def test_wrong_flags(flags: list[str], message: str, tmp_path: pathlib.Path, config_file: pathlib.Path) -> None:
    done = call("train", f"--config={config_file}", f"--workdir={tmp_path / 'pod'}", *flags, status=2)
    assert message in done.stderr


@pytest.mark.parametrize(
    ("variables", "launched"),
    [
        ({}, False),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, False),  # a script of sbatch
        ({"SLURM_STEP_NUM_TASKS": "1"}, False),
        ({"SLURM_STEP_NUM_TASKS": "4"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, True),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, False),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, True),
    ],
)
def test_launchers_are_known_by_their_variables(
    variables: dict[str, str], launched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "TPU_WORKER_HOSTNAMES", "JOB_COMPLETION_INDEX"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert is_launched() == launched


def slurm(rank: int, job: int) -> dict[str, str]:
    """What `srun` sets for one of two tasks on one node; jax takes the port from the job's number."""
    job_and_place = {"SLURM_JOB_ID": str(job), "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
    sizes = {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"}
    return job_and_place | sizes | {"SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "2"}


def open_mpi(rank: int, job: int) -> dict[str, str]:
    """What `mpirun` of Open MPI 4 sets for one of two processes on one host."""
    uri = {"OMPI_MCA_orte_hnp_uri": f"{job}.0;tcp://127.0.0.1:34911"}
    sizes = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    return uri | sizes | {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_RANK": str(rank)}


@pytest.mark.long
@pytest.mark.parametrize("launcher", [slurm, open_mpi])
def test_a_launcher_tells_the_processes(
    launcher: Callable[[int, int], dict[str, str]],
    tiny_config: Config,
    tmp_path: pathlib.Path,
    config_file: pathlib.Path,
) -> None:
    config = make_config(tiny_config, "2x1x2", {"train.eval_every": 0})
    flags = [f"--config={config_file}", *as_flags(config), f"--workdir={tmp_path / 'pod'}", "--fake_devices=2"]
    job = random.randrange(2**20)
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(started("train", *flags, environment=launcher(rank, job))) for rank in range(2)]
        ended = [each.wait() for each in running]
    assert [each.returncode for each in ended] == [0, 0], [each.stderr for each in ended]
    assert "data=2 × pipe=1 × tensor=2 on 4 cpu devices" in ended[0].stderr
    assert ended[1].stderr == ""


def test_a_mesh_that_does_not_use_the_devices(
    tiny_config: Config, tmp_path: pathlib.Path, config_file: pathlib.Path
) -> None:
    for mesh, message in {
        "1x1x1": "1 device, which 2 processes cannot share equally",
        "1x1x2": "needs 2 devices; the 2 processes have 4, and none may be idle",
    }.items():
        flags = as_flags(make_config(tiny_config, mesh, {"train.eval_every": 0}))
        ended = run_pod(2, 2, "train", f"--config={config_file}", *flags, f"--workdir={tmp_path / 'pod'}")
        assert [each.returncode for each in ended] == [2, 2]
        assert "".join(each.stderr for each in ended).count(message) == 1


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_process_stops_all_after_one_step(
    rank: int, tiny_config: Config, tmp_path: pathlib.Path, config_file: pathlib.Path
) -> None:
    config = make_config(tiny_config, "2x1x2", {"train.num_steps": 10**6, "train.eval_every": 0})
    config.train.checkpoint_every = 10**6
    flags = [f"--config={config_file}", *as_flags(config), f"--workdir={tmp_path / 'pod'}"]
    with pod(2, 2, "train", *flags) as running:
        wait_for_steps(tmp_path / "pod")
        send(running[rank], signal.SIGTERM)
        ended = [each.wait() for each in running]
    assert [each.returncode for each in ended] == [128 + signal.SIGTERM] * 2, [each.stderr for each in ended]
    (step,) = (int(path.name) for path in (tmp_path / "pod" / "checkpoints").iterdir())
    assert step == numbers(tmp_path / "pod")[-1][0]
    assert f"SIGTERM to rank {rank}: all processes stop after the same step" in ended[0].stderr
    assert f"Stopped by SIGTERM to rank {rank} at step {step}" in ended[0].stderr


def wait_for_steps(workdir: pathlib.Path) -> None:
    metrics, deadline = workdir / "metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("\n") > 3):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def send(running: Running, number: signal.Signals) -> None:
    assert running.process.pid is not None
    os.kill(running.process.pid, number)


@pytest.mark.long
@pytest.mark.parametrize(("number", "rank"), [(signal.SIGKILL, 1), (signal.SIGSTOP, 1), (signal.SIGSTOP, 0)])
def test_a_lost_process_ends_the_others(
    number: signal.Signals, rank: int, tiny_config: Config, tmp_path: pathlib.Path, config_file: pathlib.Path
) -> None:
    config = make_config(tiny_config, "2x1x2", {"train.num_steps": 10**6, "train.eval_every": 0})
    config.train.peer_timeout_s = 6
    flags = [f"--config={config_file}", *as_flags(config), f"--workdir={tmp_path / 'pod'}"]
    with pod(2, 2, "train", *flags) as running:
        wait_for_steps(tmp_path / "pod")
        send(running[rank], number)
        lost_s = time.monotonic()
        survivor = running[1 - rank].wait()
        assert time.monotonic() - lost_s < 12
    assert survivor.returncode == 1
    assert f"lost rank {rank} (" in survivor.stderr
    assert "Traceback" not in survivor.stderr


@pytest.mark.long
def test_all_processes_save_after_the_steps_that_the_first_chooses(
    tiny_config: Config, tmp_path: pathlib.Path, config_file: pathlib.Path
) -> None:
    fields = {"train.num_steps": 120, "train.eval_every": 0, "train.checkpoint_every": "auto"}
    config = make_config(tiny_config, "2x1x2", fields | {"train.checkpoint_overhead": 1.0})
    flags = [f"--config={config_file}", *as_flags(config), f"--workdir={tmp_path / 'pod'}"]
    ended = run_pod(2, 2, "train", *flags)
    assert [each.returncode for each in ended] == [0, 0], [each.stderr for each in ended]
    assert re.search(r"Checkpoints every \d+ steps \(.*\): a save costs", ended[0].stderr)
    assert "Checkpoints every" not in ended[1].stderr
    records = map(json.loads, (tmp_path / "pod" / "metrics.jsonl").read_text().splitlines())
    decisions = [record for record in records if "checkpoint_interval" in record]
    assert decisions
    assert min(record["step"] for record in decisions) > 20
