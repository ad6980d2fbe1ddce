"""Training that `launch` starts equals training in one process: by `local`, and by scripts for ssh and Open MPI."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

from fiddlex.config import Config
from fiddlex.config.overrides import replaced
from fiddlex.errors import ConfigError
from fiddlex.launch import programs
from fiddlex.launch.supervisor import Limits, supervise
from fiddlex.train import loop
from tests.cluster.pods import free_port
from tests.cluster.test_processes import as_flags, make_config, numbers  # a fixture
from tests.launch.test_supervised_runs import losses, wait_for_step
from tests.programs import EXPERIMENTS, ROOT, call

SSH = '#!/bin/bash\nwhile (($# > 2)); do shift; done\nexec sh -c "$2"\n'


@pytest.mark.long
@pytest.mark.parametrize("kind", ["local", "ssh"])
def test_training_equals_that_of_one_process(
    kind: str,
    tiny_config: Config,
    tmp_path: pathlib.Path,
    config_file: pathlib.Path,
) -> None:
    config = make_config(tiny_config, "1x2x1", {})
    loop.train(config, tmp_path / "one")
    run = [f"--config={config_file}", *as_flags(config), f"--workdir={tmp_path / 'run'}"]
    launch = [sys.executable, str(EXPERIMENTS / "launch.py")]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    if kind == "local":
        line = [*launch, "local", "--processes=2", "--devices_per_process=1", "--", "train.py", *run]
    else:
        (tmp_path / "ssh").write_text(SSH)
        (tmp_path / "ssh").chmod(0o755)
        hosts = ["--hosts=localhost,127.0.0.1", "--devices_per_host=1", f"--port={free_port()}"]
        call("launch", "ssh", *run, "--topology=h100", "--num_devices=2", *hosts, f"--write={tmp_path / 'job'}")
        line = [str(tmp_path / "job")]
        environment |= {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(numbers(tmp_path / "run"), numbers(tmp_path / "one"), rtol=1e-6)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs Open MPI")
def test_a_notice_to_open_mpi_saves_the_run(
    tiny_config: Config, tmp_path: pathlib.Path, config_file: pathlib.Path
) -> None:
    fields = {"train.num_steps": 600, "train.checkpoint_every": 100, "train.eval_every": 0}
    config = make_config(tiny_config, "2x1x1", fields)
    loop.train(replaced(config, {"mesh.data": 1}), tmp_path / "one")
    run = [f"--config={config_file}", *as_flags(config), f"--workdir={tmp_path / 'run'}", f"--port={free_port()}"]
    hosts = ["--hosts=localhost", "--processes_per_host=2", "--num_devices=2", "--fake_devices=1"]
    call("launch", "mpi", *run, *hosts, f"--write={tmp_path / 'job'}")
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    for status in (143, 0):
        with subprocess.Popen(
            [tmp_path / "job"], env=os.environ | allowed, stderr=subprocess.PIPE, text=True
        ) as script:
            if status:
                wait_for_step(tmp_path / "run", 20)
                script.send_signal(signal.SIGTERM)
            _, said = script.communicate(timeout=400)
        assert script.returncode == status, said
        assert ("Stopped by SIGTERM" in said) == bool(status)
    ours, theirs = losses(tmp_path / "run"), losses(tmp_path / "one")
    assert list(ours) == list(theirs)
    np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=1e-5)


@pytest.mark.parametrize(
    "words", [["train"], ["fiddlex", "train"], ["train.py"], ["experiments/train.py"]], ids=" ".join
)
def test_a_program_goes_by_its_names(words: list[str]) -> None:
    command = programs.program_command([*words, "--workdir=/a"], elastic=True)
    assert command == [sys.executable, "-P", "-m", "fiddlex", "train", "--workdir=/a", "--elastic"]


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["--process_id=1"], "--process_id after --: launch gives the program this flag. Leave it out."),
        (["-fake_devices", "2"], "Put --devices_per_process before -- instead."),
        (["--noelastic"], "Put --elastic before -- instead."),
    ],
)
def test_flags_that_launch_gives_are_refused(words: list[str], remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        programs.local_commands(
            programs.program_command(["train", *words], elastic=False), num_processes=2, devices_per_process=4, port=7
        )


def test_a_program_of_the_current_folder_is_not_taken_for_fiddlex(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fiddlex").mkdir()
    for name in ("random.py", "fiddlex/__init__.py", "fiddlex/__main__.py"):
        (tmp_path / name).write_text("raise SystemExit(0)")
    monkeypatch.chdir(tmp_path)
    assert supervise([programs.program_command(["train", "--help"], elastic=False)], Limits(), workdir=None) == 0
    assert "Trains the model of a config" in capfd.readouterr().out


def test_every_python_that_fiddlex_starts_leaves_out_the_current_folder() -> None:
    files = [file.read_text(encoding="utf-8") for file in (ROOT / "fiddlex").rglob("*.py")]
    starts = [start for text in files for start in re.findall(r"\[sys\.executable, (.*)", text)]
    assert len(starts) >= 5
    assert all(start.startswith(('"-P", ', '"-IS", ')) for start in starts), starts


def test_the_processes_of_a_machine_differ_by_their_rank() -> None:
    lines = programs.local_commands(["train"], num_processes=2, devices_per_process=4, port=7)
    shared = ["train", "--coordinator_address=localhost:7", "--num_processes=2"]
    assert lines == [[*shared, f"--process_id={rank}", "--fake_devices=4"] for rank in range(2)]


@pytest.mark.parametrize(
    ("environment", "ids"),
    [
        ({}, "0,1"),
        ({"SLURM_LOCALID": "0", "SLURM_PROCID": "6"}, "0,1"),
        ({"SLURM_LOCALID": "3", "SLURM_PROCID": "7"}, "6,7"),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_RANK": "5"}, "2,3"),
    ],
)
def test_the_processes_of_a_host_share_its_gpus(environment: dict[str, str], ids: str) -> None:
    assert programs.local_device_ids(2, environment) == ids


def test_the_first_task_leaves_the_status_of_the_run(tmp_path: pathlib.Path) -> None:
    for rank, folder in ((0, "a"), (1, "b"), (0, "missing/c")):
        programs.leave_status(143, {programs.STATUS_FILE: str(tmp_path / folder), "SLURM_PROCID": str(rank)})
    programs.leave_status(1, {"SLURM_PROCID": "0"})
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "143\n")]


@pytest.mark.parametrize(
    ("arguments", "workdir"),
    [
        (["train", "--workdir=/a", "--workdir=/b=c"], "/b=c"),
        (["train", "--workdir", "/a", "--config=x"], "/a"),
        (["benchmark", "--config=x"], None),
    ],
)
def test_the_value_of_a_flag(arguments: list[str], workdir: str | None) -> None:
    assert programs.flag_value("workdir", arguments) == workdir
