"""Ctrl-C while the main thread is where Python cannot interrupt it; what libraries write past Python."""

import pathlib
import signal
import subprocess
import sys
import time

import pytest

from fiddlex.terminal import library_log
from tests.pseudo_terminal import recorded
from tests.small_run import ENVIRONMENT

PROGRAM = """
import hashlib, os, pathlib, sys
from fiddlex.terminal import library_log
from fiddlex.terminal.command_line import run
from fiddlex.terminal.progress import phase
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


POSTPONED = """
        import gc, signal, time
        from fiddlex.terminal import interrupts
        handled = []
        signal.signal(signal.SIGINT, lambda number, frame: interrupts.postponed(number) or handled.append(number))
        interrupts.may_leave_if(lambda number, times: times > 1)

        def collected(phase, info):
            if phase == "start":
                os.kill(os.getpid(), signal.SIGINT)

        gc.callbacks.append(collected)
        gc.collect()
        gc.callbacks.remove(collected)
        time.sleep(3 * interrupts.GRACE_S)
        print(*handled)
"""


def test_a_signal_during_garbage_collection_counts_once() -> None:
    line = [sys.executable, "-c", PROGRAM.format(body=POSTPONED)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, env=ENVIRONMENT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "begun\n2\n", "")


def test_a_program_that_uses_the_library_is_not_ended_during_an_import(tmp_path: pathlib.Path) -> None:
    """As a command is; it may have more to lose."""
    (tmp_path / "slow.py").write_text(
        "from fiddlex.terminal import interrupts\ninterrupts.interrupt(KeyboardInterrupt)\n"
    )
    program = "try:\n    import slow\nexcept KeyboardInterrupt:\n    print('saved')\n"
    line = [sys.executable, "-c", f"import sys; sys.path.append({str(tmp_path)!r})\n{program}"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, env=ENVIRONMENT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "saved\n", "")


def test_ctrl_c_leaves_a_clean_terminal() -> None:
    with recorded([sys.executable, "-c", PROGRAM.format(body=UNINTERRUPTIBLE)], ENVIRONMENT) as shown:
        shown.follow_to("Working  ")  # and the seconds, of which a slow machine may not show the first
        status, seconds = shown.interrupted()
    assert status == 130
    assert seconds < 10
    assert not shown.cursor_is_hidden
    assert [line.removeprefix("^C") for line in shown.lines] == ["begun", "-c: interrupted."]


@pytest.mark.parametrize("body", [UNINTERRUPTIBLE, "time.sleep(60)"], ids=["uninterruptible", "sleeping"])
def test_sigterm_leaves_a_clean_terminal(body: str) -> None:
    with recorded([sys.executable, "-c", PROGRAM.format(body=f"import time; {body}")], ENVIRONMENT) as shown:
        shown.follow_to("Working  ")  # and the seconds, of which a slow machine may not show the first
        status, seconds = shown.terminated()
    assert status == 143
    assert seconds < 10
    assert not shown.cursor_is_hidden
    assert shown.lines == ["begun"] + ["-c: stopped by SIGTERM."] * (body == UNINTERRUPTIBLE)


ENDED_BY_ANOTHER = """
import threading, time
from fiddlex.cluster import processes
from fiddlex.terminal.progress import phase

with phase("Working"):
    print("begun", flush=True)
    threading.Timer(1, processes._leave, [3]).start()
    time.sleep(60)
"""


def test_a_process_that_ends_with_others_leaves_a_clean_terminal() -> None:
    with recorded([sys.executable, "-c", ENDED_BY_ANOTHER], ENVIRONMENT) as shown:
        shown.follow_to("Working")
        assert shown.cursor_is_hidden
        assert shown.ended() == 3
    assert not shown.cursor_is_hidden
    assert shown.lines == ["begun"]


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


def test_where_a_workdir_has_no_room_it_stays_in_its_temporary_file(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, full = tmp_path / "before.log", tmp_path / "full"
    before.write_text("E0000 common_lib.cc: no TPU\n")
    full.mkdir()
    (full / library_log.NAME).symlink_to("/dev/full")
    monkeypatch.setattr(library_log, "_file", before)
    library_log.keep_in(full)
    assert library_log.told() == f"Messages of XLA and other libraries are in {before}."


def test_where_standard_error_is_no_terminal_it_has_all(tmp_path: pathlib.Path) -> None:
    line = [sys.executable, "-c", PROGRAM.format(body=CHATTER)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, env=ENVIRONMENT)
    assert done.stderr == "E0000 common_lib.cc: no TPU\n"
