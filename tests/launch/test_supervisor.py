"""The supervisor starts failed processes again, and knows when to give up."""

import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import pytest

from fiddlex.launch import supervisor
from fiddlex.launch.supervisor import Limits, newest_step, supervise
from fiddlex.terminal import interrupts
from fiddlex.train.run.checkpoints.checkpoint import Checkpoints
from tests.programs import ROOT

QUICK = Limits(max_restarts=10, backoff_s=0.01)


def shell(script: str, workdir: pathlib.Path) -> list[str]:
    return ["bash", "-c", f"cd {workdir}; {script}"]


def starts(workdir: pathlib.Path) -> int:
    return (workdir / "starts").read_text().count("start")


def test_a_run_that_fails_goes_on_until_it_is_done(tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = "echo start >> starts; n=$(wc -l < starts); mkdir -p checkpoints/${n}0; [ $n -ge 5 ] || kill -9 $$"
    assert supervise([shell(script, tmp_path)], QUICK, workdir=tmp_path) == 0
    assert starts(tmp_path) == 5
    said = capfd.readouterr().err.splitlines()
    assert "0 s after the start, the process was killed by SIGKILL. Restart 1 of 10 in 0.01 s, from step 10." in said[0]
    assert said[-1] == "launch: done after 4 restarts."


def test_starts_that_gain_nothing_end_it(tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "checkpoints" / "20").mkdir(parents=True)
    (tmp_path / "checkpoints" / "30.orbax-checkpoint-tmp").mkdir()
    assert supervise([shell("echo start >> starts; exit 1", tmp_path)], QUICK, workdir=tmp_path) == 1
    assert starts(tmp_path) == 3
    assert "Gives up: 3 starts in a row saved no checkpoint after step 20." in capfd.readouterr().err


def test_the_number_of_restarts_is_bounded(tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = "echo start >> starts; mkdir -p checkpoints/$(wc -l < starts); exit 1"
    assert supervise([shell(script, tmp_path)], Limits(max_restarts=4, backoff_s=0.01), workdir=tmp_path) == 1
    assert starts(tmp_path) == 5
    assert "Gives up after --max_restarts=4" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGRTMIN, "SIGRTMIN"), (signal.SIGRTMIN + 1, "signal 35")]
)
def test_a_run_that_any_signal_kills_goes_on(
    number: int, name: str, tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = f"echo start >> starts; test $(wc -l < starts) = 2 || kill -{int(number)} $$"
    assert supervise([shell(script, tmp_path)], QUICK, workdir=tmp_path) == 0
    assert f"the process was killed by {name}." in capfd.readouterr().err


def test_a_mistake_is_not_tried_again(tmp_path: pathlib.Path) -> None:
    assert supervise([shell("echo start >> starts; exit 2", tmp_path)], QUICK, workdir=tmp_path) == 2
    assert starts(tmp_path) == 1


def test_the_others_are_ended_when_one_fails(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_GRACE_S", 0.5)
    stuck = shell("kill -STOP $$", tmp_path)
    started_s = time.monotonic()
    assert supervise([stuck, shell("exit 1", tmp_path)], Limits(max_restarts=0), workdir=tmp_path) == 1
    assert time.monotonic() - started_s < 10


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_stops_the_run_for_good(number: signal.Signals, tmp_path: pathlib.Path) -> None:
    save = f"sleep {4 * interrupts.GRACE_S}; mkdir -p checkpoints/7; exit {128 + number}"
    script = f"trap '{save}' {number.name}; touch up; while :; do sleep 0.05; done"
    with _supervised(shell(script, tmp_path)) as process:
        _wait_for(tmp_path / "up")
        process.send_signal(number)
        assert process.wait(timeout=20) == 128 + number
    assert newest_step(tmp_path) == 7


def test_a_supervisor_under_nohup_outlives_its_terminal(tmp_path: pathlib.Path) -> None:
    script = "touch up; until [ -e go ]; do sleep 0.05; done"
    with _supervised(shell(script, tmp_path), under=["nohup"]) as process:
        _wait_for(tmp_path / "up")
        process.send_signal(signal.SIGHUP)
        time.sleep(2 * interrupts.GRACE_S)
        (tmp_path / "go").touch()
        assert process.wait(timeout=20) == 0


def test_only_folders_that_the_trainer_reads_are_checkpoints(tmp_path: pathlib.Path) -> None:
    assert newest_step(tmp_path) == -1
    for name in ("0", "7", "0040", "²", "٥٠", "60.orbax-checkpoint-tmp"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "checkpoints" / "70").touch()
    assert newest_step(tmp_path) == 7
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == [0, 7]


@pytest.mark.parametrize(("elastic", "status", "number"), [(False, 143, 1), (True, 0, 2)])
def test_a_stop_that_another_host_was_asked_for(
    elastic: bool, status: int, number: int, tmp_path: pathlib.Path
) -> None:
    script = "echo start >> starts; n=$(wc -l < starts); mkdir -p checkpoints/$n; [ $n -ge 2 ] || exit 143"
    assert supervise([shell(script, tmp_path)], QUICK._replace(elastic=elastic), workdir=tmp_path) == status
    assert starts(tmp_path) == number


def test_a_stop_in_which_a_process_fails_is_a_restart(tmp_path: pathlib.Path) -> None:
    script = "echo start >> starts; [ $(wc -l < starts) -ge 3 ] || exit"
    assert supervise([shell(f"{script} {status}", tmp_path) for status in (143, 1)], QUICK, workdir=tmp_path) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has died")
def test_no_process_outlives_its_supervisor(tmp_path: pathlib.Path) -> None:
    script = "trap 'touch ended; exit 143' TERM; touch up; while :; do sleep 0.05; done"
    with _supervised(shell(script, tmp_path)) as process:
        _wait_for(tmp_path / "up")
        process.kill()
        process.wait()
        _wait_for(tmp_path / "ended")


def _supervised(command: list[str], *, under: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """A supervisor as `fiddlex launch` runs it, which a signal may end unlike a function of a library."""
    code = (
        "import sys; from fiddlex.terminal.command_line import run;"
        "from fiddlex.launch.supervisor import Limits, supervise;"
        f"run(lambda argv: sys.exit(supervise([{command!r}], Limits(), workdir=None)))"
    )
    return subprocess.Popen([*under, sys.executable, "-c", code], cwd=ROOT)


def _wait_for(path: pathlib.Path) -> None:
    end_s = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < end_s, path
        time.sleep(0.02)


def test_a_signal_while_the_processes_start_is_not_lost(tmp_path: pathlib.Path) -> None:
    up = shell("touch up; sleep 60", tmp_path)
    code = (
        "import os, signal, subprocess, sys; from fiddlex.launch import supervisor;"
        "start = subprocess.Popen;"
        "stop = lambda: os.kill(os.getpid(), signal.SIGTERM);"
        "subprocess.Popen = lambda *args, **options: (stop(), start(*args, **options))[1];"
        f"sys.exit(supervisor.supervise([{up!r}, {up!r}], supervisor.Limits(), workdir=None))"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as process:
        assert process.wait(timeout=20) == 128 + signal.SIGTERM


def test_a_program_without_checkpoints_is_tried_three_times(tmp_path: pathlib.Path) -> None:
    assert supervise([shell("echo start >> starts; exit 1", tmp_path)], QUICK, workdir=None) == 1
    assert starts(tmp_path) == 3
