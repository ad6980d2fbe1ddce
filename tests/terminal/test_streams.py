"""Standard streams that cannot be written, or lack a character: a reader that has gone, a full disk, latin-1."""

import contextlib
import os
import pathlib
import pty
import subprocess
import sys
import time

import pytest

from fiddlex.train.run.checkpoints.checkpoint import Checkpoints
from tests.pseudo_terminal import IN_TERMINAL
from tests.small_run import ENVIRONMENT, small, steps, train_line

PROGRAM = """
import logging, os, sys
from fiddlex.terminal.command_line import run

def main(argv):
    sys.stdin.read()  # until the test has done to the streams what it does
    for i in range(3):
        logging.getLogger("fiddlex").info("line %d", i)
        print("another", file=sys.stderr)
    try:
        print(os.environ.get("TEXT", "result"))
    finally:
        if "STATUS" in os.environ:
            sys.exit(int(os.environ["STATUS"]))

run(main)
"""
LOG = "".join(f"line {i}\nanother\n" for i in range(3))
CLOSED = "-c: standard output is closed, so the result cannot be printed. Redirect it to a file.\n"


STOPPED = {"STATUS": "143"}


@pytest.mark.parametrize(
    ("redirection", "environment", "expected"),
    [
        ("", {}, (0, "result\n", LOG)),
        ("2> /dev/full", {}, (0, "result\n", "")),
        ("2>&-", {}, (0, "result\n", "")),
        (">&-", {}, (1, "", f"{LOG}{CLOSED}")),
        ("> /dev/full", {}, (1, "", f"{LOG}-c: [Errno 28] No space left on device\n")),
        ("> /dev/full", STOPPED, (143, "", LOG)),
        ("> /dev/full 2>&1", {}, (1, "", "")),
    ],
)
def test_what_cannot_be_written(redirection: str, environment: dict[str, str], expected: tuple[int, str, str]) -> None:
    line = ["bash", "-c", f'exec "$@" {redirection}', "bash", sys.executable, "-c", PROGRAM]
    environment = ENVIRONMENT | environment | {"PYTHONWARNINGS": "error"}
    done = subprocess.run(line, capture_output=True, text=True, input="", timeout=60, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == expected


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["-c", PROGRAM], "caf\xe9 \u2026 \udc80"),  # the last is half a character, which UTF-8 lacks too
        (["-m", "fiddlex"], "--flag=value \u2026"),
        (["-m", "fiddlex", "train", "--help"], "[--config.mesh.data=4 \u2026]"),
    ],
)
def test_characters_that_standard_output_lacks(encoding: str, arguments: list[str], text: str) -> None:
    environment = ENVIRONMENT | {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "1", "TEXT": text}
    done = subprocess.run([sys.executable, *arguments], stdout=subprocess.PIPE, input=b"", timeout=60, env=environment)
    assert done.returncode == 0
    assert text.encode(encoding, "backslashreplace") in done.stdout


@pytest.mark.parametrize(
    ("stream", "environment", "status"), [("stderr", {}, 0), ("stdout", {}, 1), ("stdout", STOPPED, 143)]
)
def test_a_reader_that_has_gone(stream: str, environment: dict[str, str], status: int) -> None:
    line, pipe = [sys.executable, "-c", PROGRAM], subprocess.PIPE
    environment = ENVIRONMENT | environment
    with subprocess.Popen(line, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        getattr(process, stream).close()
        assert process.stdin
        process.stdin.close()
        other = process.stdout if stream == "stderr" else process.stderr
        assert other
        assert other.read() == ("result\n" if stream == "stderr" else LOG)
        assert process.wait(timeout=60) == status


def test_training_goes_on_when_nobody_reads_its_log(tmp_path: pathlib.Path, text_file: pathlib.Path) -> None:
    """As `train.py … 2>&1 | head -1`: the run is as whole as any; that its JSON was not delivered is status 1."""
    line = [*train_line(tmp_path, small(text_file, train_num_steps=20)), "--format=json"]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=ENVIRONMENT)
    assert process.stdout
    assert process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=120) == 1
    assert steps(tmp_path) == list(range(1, 21))
    assert Checkpoints(tmp_path).steps()[-1] == 20


def test_a_closed_terminal_stops_training_and_loses_nothing(tmp_path: pathlib.Path, text_file: pathlib.Path) -> None:
    workdir = tmp_path / "run"
    terminal, child = pty.openpty()
    line = [
        sys.executable,
        "-c",
        IN_TERMINAL,
        *train_line(workdir, small(text_file, train_num_steps=1_000_000)),
        "--format=json",
    ]
    process = subprocess.Popen(
        line, stdin=child, stdout=child, stderr=child, start_new_session=True, env=ENVIRONMENT | {"TERM": "xterm"}
    )
    os.close(child)
    os.set_blocking(terminal, False)
    deadline = time.monotonic() + 120
    while max(steps(workdir), default=0) < 5 and time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(BlockingIOError):
            os.read(terminal, 2**16)
        time.sleep(0.02)
    os.close(terminal)  # the kernel sends SIGHUP, and from now on every write fails
    assert process.wait(timeout=60) == 129
    reached = max(steps(workdir))
    assert reached >= 5
    assert steps(workdir) == list(range(1, reached + 1))
    assert Checkpoints(workdir).steps()[-1] == reached
