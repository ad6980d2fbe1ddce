"""Runs of two hosts train like one process, end when the hosts lose each other, and go on when they are back."""

import contextlib
import pathlib
import re
import subprocess
import time
from collections.abc import Iterator

import numpy as np
import pytest

from fiddlex.config import Config
from fiddlex.train import loop
from fiddlex.train.run.checkpoints.inventory import finished, verify
from tests.cluster.hosts import MISSING, Network
from tests.cluster.test_processes import as_flags, make_config
from tests.launch.test_supervised_runs import losses, newest_loss, wait_for_step

pytestmark = [pytest.mark.long, pytest.mark.skipif(MISSING, reason="needs root and network namespaces (iproute2)")]
PEER_TIMEOUT_S = 6
FIELDS = {"train.eval_every": 0, "train.checkpoint_every": 10, "train.peer_timeout_s": PEER_TIMEOUT_S}


@contextlib.contextmanager
def on_hosts(network: Network, *words: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Starts a process of a run on each host."""
    flags = ["--coordinator_address=host0:12345", f"--num_processes={len(network.addresses)}", "--fake_devices=1"]
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(network.started(host, *words, *flags, f"--process_id={rank}"))
            for rank, host in enumerate(network.addresses)
        ]


def said(processes: list[subprocess.Popen[str]]) -> list[str]:
    """What the processes wrote, once all have ended."""
    return [process.communicate(timeout=240)[0] for process in processes]


def check_losses(ours: pathlib.Path, theirs: pathlib.Path) -> None:
    assert list(losses(ours)) == list(losses(theirs))
    np.testing.assert_allclose(list(losses(ours).values()), list(losses(theirs).values()), rtol=1e-5)


def test_a_run_ends_when_a_host_is_cut_off_and_goes_on_when_it_is_back(
    tiny_config: Config, tmp_path: pathlib.Path, config_file: pathlib.Path
) -> None:
    config = make_config(tiny_config, "2x1x1", FIELDS | {"train.num_steps": 80})
    loop.train(config, tmp_path / "one")
    run = tmp_path / "hosts"
    words = ["train", f"--config={config_file}", *as_flags(config), f"--workdir={run}"]
    with Network(2) as network:
        with on_hosts(network, *words) as processes:
            wait_for_step(run, 15)
            network.cut("host1")
            time.sleep(2)
            network.mend("host1")  # a short loss changes nothing
            wait_for_step(run, newest_loss(run) + 10)
            network.cut("host1")
            cut_s = time.monotonic()
            first, second = said(processes)
            assert time.monotonic() - cut_s < PEER_TIMEOUT_S + 6
            assert [process.returncode for process in processes] == [1, 1]
        silent = f"not heard of for {PEER_TIMEOUT_S} s (train.peer_timeout_s). All processes end; the next start"
        assert f"rank 0 (host0), fiddlex train: lost rank 1 (host1), {silent}" in first
        coordinator = "lost the coordinator of the run on the host of rank 0 (host0)"
        assert f"rank 1 (host1), fiddlex train: {coordinator}, {silent}" in second
        assert "Traceback" not in first + second
        *_, newest = finished(run)
        assert verify(newest).whole
        assert newest_loss(run) < 80
        network.mend("host1")
        with on_hosts(network, *words) as processes:
            first, _ = said(processes)
            assert [process.returncode for process in processes] == [0, 0], first
        assert f"Resuming from step {int(newest.name)}" in first
    check_losses(run, tmp_path / "one")


def test_an_elastic_run_goes_on_with_the_host_that_remains(
    tiny_config: Config, tmp_path: pathlib.Path, config_file: pathlib.Path
) -> None:
    config = make_config(tiny_config, "2x1x1", FIELDS | {"train.num_steps": 60})
    loop.train(config, tmp_path / "one")
    run = tmp_path / "hosts"
    words = ["launch", "task", "--elastic", "--", "train", f"--config={config_file}", *as_flags(config)]
    with Network(2) as network, on_hosts(network, *words, f"--workdir={run}", "--join_timeout_s=20") as processes:
        wait_for_step(run, 25)
        network.cut("host1")
        (first,) = said(processes[:1])
    assert processes[0].returncode == 0, first
    assert "1 of 2 processes have joined within 20 s, without rank 1: the run goes on with 1." in first
    assert re.findall(r"gpt with .* data=(\d)", first) == ["2", "1"]
    check_losses(run, tmp_path / "one")
