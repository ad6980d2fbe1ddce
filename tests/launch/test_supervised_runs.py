"""Supervised runs heal: processes are killed at random moments, and hosts stay away and come back."""

import contextlib
import json
import os
import pathlib
import random
import signal
import time
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from fiddlex.config import Config
from fiddlex.config.overrides import replaced
from fiddlex.train import loop
from fiddlex.train.trainer import load_trainer
from tests.cluster.pods import free_port
from tests.cluster.test_processes import as_flags, make_config
from tests.programs import Running, started

pytestmark = pytest.mark.long


def losses(workdir: pathlib.Path) -> dict[int, float]:
    records = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def newest_loss(workdir: pathlib.Path) -> int:
    """The step of the last training record; 0 while there is none."""
    with contextlib.suppress(OSError, ValueError):
        return max(losses(workdir), default=0)
    return 0


def wait_for_step(workdir: pathlib.Path, step: int) -> None:
    deadline = time.monotonic() + 240
    while newest_loss(workdir) < step:
        assert time.monotonic() < deadline, newest_loss(workdir)
        time.sleep(0.05)


def children(pid: int) -> list[int]:
    """The processes that a supervisor has started, in the order of their start."""
    return [int(each) for each in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def weights(workdir: pathlib.Path) -> list[np.ndarray]:
    return jax.tree.leaves(load_trainer(workdir).weights())


@pytest.mark.parametrize("semantics", ["sync", "2bw"])
def test_final_weights_are_those_of_an_undisturbed_run(
    semantics: str, tiny_config: Config, tmp_path: pathlib.Path, config_file: pathlib.Path
) -> None:
    fields = {"train.num_steps": 60, "train.checkpoint_every": 5, "train.eval_every": 0, "optimizer.name": "adamw"}
    config = make_config(tiny_config, "1x2x2", fields | {"pipeline.semantics": semantics})
    flags = ["local", "--processes=2", "--devices_per_process=2", "--", "train"]
    flags += [f"--config={config_file}", *as_flags(config)]
    with started("launch", *flags, f"--workdir={tmp_path / 'quiet'}") as running:
        assert running.wait().returncode == 0
    chosen, killed = random.Random(7), 0
    with started("launch", *flags, f"--workdir={tmp_path / 'killed'}") as running:
        assert running.process.pid is not None
        for step in (8, 23, 41):
            wait_for_step(tmp_path / "killed", step)
            time.sleep(chosen.random() * 0.3)
            with contextlib.suppress(ProcessLookupError):
                os.kill(chosen.choice(children(running.process.pid)), signal.SIGKILL)
                killed += 1
        ended = running.wait()
    assert ended.returncode == 0, ended.stderr
    assert killed == 3
    assert ended.stderr.count("was killed by SIGKILL") == 3
    assert "launch: done after 3 restarts." in ended.stderr
    assert losses(tmp_path / "killed") == losses(tmp_path / "quiet")
    for one, other in zip(weights(tmp_path / "quiet"), weights(tmp_path / "killed"), strict=True):
        np.testing.assert_array_equal(one, other)


@contextlib.contextmanager
def host(address: str, number: int, rank: int, *flags: object) -> Iterator[Running]:
    place = [f"--coordinator_address={address}", f"--num_processes={number}", f"--process_id={rank}"]
    with started("launch", "task", "--elastic", "--", "train", *flags, *place, "--fake_devices=1") as running:
        yield running


def test_a_run_shrinks_and_grows_with_its_hosts(
    tiny_config: Config, tmp_path: pathlib.Path, config_file: pathlib.Path
) -> None:
    fields = {"train.num_steps": 300, "train.checkpoint_every": 10, "train.eval_every": 0, "model.dropout": 0.1}
    config = make_config(tiny_config, "4x1x1", fields)
    loop.train(replaced(config, {"mesh.data": 1}), tmp_path / "one")
    flags = [f"--config={config_file}", *as_flags(config), f"--workdir={tmp_path / 'hosts'}"]
    flags += ["--join_timeout_s=3"]
    address = f"localhost:{free_port()}"
    with contextlib.ExitStack() as stack:
        supervisors = [stack.enter_context(host(address, 4, rank, *flags)) for rank in range(4)]
        wait_for_step(tmp_path / "hosts", 20)
        away = supervisors[3].process
        assert away.pid is not None
        for pid in (away.pid, *children(away.pid)):  # the supervisor first
            os.kill(pid, signal.SIGKILL)
        wait_for_step(tmp_path / "hosts", 100)
        supervisors[3] = stack.enter_context(host(address, 4, 3, *flags))
        time.sleep(3)  # it comes, and waits
        assert supervisors[1].process.pid is not None
        os.kill(children(supervisors[1].process.pid)[0], signal.SIGKILL)
        ended = [each.wait() for each in supervisors]
    assert [each.returncode for each in ended] == [0] * 4, [each.stderr for each in ended]
    meshes = [line for line in ended[0].stderr.splitlines() if line.startswith("gpt with")]
    assert [line.split("data=")[1][0] for line in meshes] == ["4", "2", "4"]
    assert "3 of 4 processes have joined within 3 s, without rank 3: the run goes on with 2." in ended[0].stderr
    ours, theirs = losses(tmp_path / "hosts"), losses(tmp_path / "one")
    assert list(ours) == list(theirs)
    np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=1e-5)
    for one, other in zip(weights(tmp_path / "one"), weights(tmp_path / "hosts"), strict=True):
        assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(one)
