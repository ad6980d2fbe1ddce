"""Ctrl-C while the main thread is where Python cannot interrupt it; what libraries write past Python."""

import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tests.small_run import ENVIRONMENT
from tests.terminal import recorded

PROGRAM = """
import hashlib, os, pathlib, sys
from fiddlex.config import library_log
from fiddlex.config.command_line import run
from fiddlex.config.progress import phase
from fiddlex.errors import DeviceError

def main(argv):
    library_log.divert()
    with phase("Working"):
        print("begun", flush=True)
        {body}

run(main)
"""
UNINTERRUPTIBLE = "hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)"
SWALLOWED = """
        import time
        try:
            time.sleep(60)
        except KeyboardInterrupt as error:
            raise ImportError('of a library') from error
"""


@pytest.mark.parametrize("body", [UNINTERRUPTIBLE, SWALLOWED], ids=["uninterruptible", "swallowed"])
def test_ctrl_c_ends_a_program_at_once(body: str) -> None:
    line = [sys.executable, "-c", PROGRAM.format(body=body)]
    with subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, process_group=0
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == "begun\n"
        start_s = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
        assert time.monotonic() - start_s < 10
    assert (process.returncode, error) == (130, "-c: interrupted.\n")


def test_ctrl_c_leaves_a_clean_terminal() -> None:
    with recorded([sys.executable, "-c", PROGRAM.format(body=UNINTERRUPTIBLE)], ENVIRONMENT) as shown:
        shown.follow_to("Working  1 s")
        status, seconds = shown.interrupted()
    assert status == 130
    assert seconds < 10
    assert not shown.cursor_is_hidden
    assert [line.removeprefix("^C") for line in shown.lines] == ["begun", "-c: interrupted."]


CHATTER = "os.write(2, b'E0000 common_lib.cc: no TPU\\n'); "


def test_what_libraries_write_is_kept_from_the_terminal(tmp_path: pathlib.Path) -> None:
    body = f"{CHATTER}library_log.keep_in(pathlib.Path({str(tmp_path)!r})); {CHATTER}print(library_log.told())"
    with recorded([sys.executable, "-c", PROGRAM.format(body=body)], ENVIRONMENT, columns=300) as shown:
        assert shown.ended() == 0
    path = tmp_path / "libraries.log"
    assert shown.lines == ["begun", f"Messages of XLA and other libraries are in {path}."]
    assert path.read_text() == "E0000 common_lib.cc: no TPU\n" * 2


def test_a_failed_program_names_what_libraries_wrote(tmp_path: pathlib.Path) -> None:
    body = f"{CHATTER}raise DeviceError('there is no device.')"
    environment = ENVIRONMENT | {"TMPDIR": str(tmp_path)}
    with recorded([sys.executable, "-c", PROGRAM.format(body=body)], environment, columns=300) as shown:
        assert shown.ended() == 1
    (path,) = tmp_path.glob("fiddlex-*.log")
    assert path.read_text() == "E0000 common_lib.cc: no TPU\n"
    message = f"Messages of XLA and other libraries are in {path}."
    assert shown.lines == ["begun", "-c: there is no device.", message]


def test_without_chatter_nothing_is_left(tmp_path: pathlib.Path) -> None:
    body = f"library_log.keep_in(pathlib.Path({str(tmp_path)!r}))"
    environment = ENVIRONMENT | {"TMPDIR": str(tmp_path)}
    with recorded([sys.executable, "-c", PROGRAM.format(body=body)], environment) as shown:
        assert shown.ended() == 0
    assert not list(tmp_path.iterdir())


def test_where_standard_error_is_no_terminal_it_has_all(tmp_path: pathlib.Path) -> None:
    line = [sys.executable, "-c", PROGRAM.format(body=CHATTER)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, env=ENVIRONMENT)
    assert done.stderr == "E0000 common_lib.cc: no TPU\n"
