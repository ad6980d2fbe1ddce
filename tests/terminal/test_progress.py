"""The line of progress: its text, and where it is shown."""

import io
import logging
import sys
import time
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fiddlex.terminal import displays, phase, progress
from fiddlex.terminal.displays import Log, Notebook, display_for
from fiddlex.terminal.log import wrapped
from fiddlex.terminal.phase import Phase
from fiddlex.terminal.readable import readable_size
from tests.pseudo_terminal import recorded
from tests.small_run import ENVIRONMENT


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    clock = types.SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(phase, "time", clock)
    return clock


def test_the_line_says_how_far_a_phase_is(clock: types.SimpleNamespace) -> None:
    evaluating = Phase("Evaluating", total=1200, unit="batches")
    assert evaluating.line(60) == "Evaluating  0/1,200 batches"
    clock.now = 8.0  # the first batch, which compiles
    evaluating.advance(1, "loss 2.5", "fast")
    assert evaluating.line(60) == "Evaluating  1/1,200 batches  loss 2.5  fast  8 s"
    clock.now = 10.0
    evaluating.advance(201, "loss 2.4", "slow")
    assert evaluating.line(60) == "Evaluating  201/1,200 batches  loss 2.4  slow  10 s left"
    clock.now = 13.0
    assert evaluating.line(60) == "Evaluating  201/1,200 batches  loss 2.4  slow  7 s left"
    assert evaluating.line(70, bar="#-") == "Evaluating  ##-----------  201/1,200 batches  loss 2.4  slow  7 s left"
    assert evaluating.line(50) == "Evaluating  201/1,200 batches  loss 2.4  7 s left"
    assert evaluating.line(40) == "Evaluating  201/1,200 batches  7 s left"
    assert evaluating.line(30) == "Evaluating  7 s left"
    assert evaluating.line(15) == "Evaluating"
    assert evaluating.line(7) == "Evalua…"


def test_the_line_of_a_phase_that_counts_nothing(clock: types.SimpleNamespace) -> None:
    compiling = Phase("Compiling the train step")
    assert compiling.line(40, bar="#-") == "Compiling the train step"
    clock.now = 83
    assert compiling.line(40, bar="#-") == "Compiling the train step  1 min 23 s"


def test_bytes_are_shown_in_their_units(clock: types.SimpleNamespace) -> None:
    preparing = Phase("Preparing", total=4 * 2**30, number=readable_size)
    preparing.advance(1234.5 * 2**20)
    assert preparing.line(60) == "Preparing  1.21 GiB/4.00 GiB"


@given(
    text=st.text(st.characters(codec="ascii", categories=["L", "N", "Zs"]), min_size=1, max_size=60),
    details=st.lists(st.text(st.characters(codec="ascii", categories=["L"]), max_size=30), max_size=4),
    total=st.integers(0, 10**9),
    share=st.floats(0, 1),
    width=st.integers(1, 220),
    bar=st.sampled_from(["", "━─"]),
)
def test_no_line_is_too_long(text: str, details: list[str], total: int, share: float, width: int, bar: str) -> None:
    shown = Phase(text, total=total, unit="steps")
    shown.advance(int(total * share), *details)
    shown.advance(int(total * share))
    assert len(shown.line(width, bar=bar)) <= width


@given(text=st.text(st.sampled_from("ab \n"), max_size=80), width=st.integers(3, 30))
def test_the_log_is_wrapped_between_words(text: str, width: int) -> None:
    assert wrapped(text, width).split() == text.split()
    for line in wrapped(text, width).split("\n"):
        assert len(line) <= width or line.startswith(" ") or " " not in line


def test_tables_and_commands_in_the_log_stay_whole() -> None:
    text = "one two three\n  one two three"
    assert wrapped(text, 8) == "one two\n  three\n  one two three"


@pytest.fixture
def no_display(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process as it is before the first phase."""
    monkeypatch.setattr(progress, "_display", None)
    yield
    assert not progress._open


@pytest.mark.usefixtures("no_display")
def test_a_library_without_a_terminal_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.phase("Evaluating", total=2) as shown:
        shown.advance(1)
        assert not progress.is_shown()
    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("no_display")
@pytest.mark.parametrize("is_closed", [True, False])
def test_a_terminal_shows_phases_without_standard_output(is_closed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed if is_closed else None)
    monkeypatch.setattr(displays, "is_terminal", lambda: True)
    with progress.phase("Evaluating"):
        assert progress.is_shown()
        with ThreadPoolExecutor() as pool:  # whose phases are not shown
            assert not pool.submit(progress.is_shown).result()


def test_a_log_tells_of_phases_that_last(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(displays, "_FIRST_LINE_S", 0.1)
    monkeypatch.setattr(displays, "_WATCH_S", 0.01)
    monkeypatch.setattr(logging.getLogger("fiddlex"), "propagate", True)
    caplog.set_level(logging.INFO)
    phases: list[Phase] = []
    log = Log(phases)
    phases.append(Phase("Training", logged=False))  # has lines of its own
    log.changed()
    time.sleep(0.2)
    phases.append(Phase("Evaluating", total=8, unit="batches"))
    log.changed()
    deadline = time.monotonic() + 10
    while len(caplog.messages) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    phases.clear()
    log.changed()
    assert caplog.messages[:2] == ["Evaluating  0/8 batches"] * 2


def test_a_notebook_has_one_output_which_ends_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    class Handle:
        def update(self, content: dict[str, str], *, raw: bool) -> None:
            shown.append(content["text/plain"])

    def display(content: dict[str, str], *, raw: bool, display_id: bool) -> Handle:
        shown.append(content["text/plain"])
        return Handle()

    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=display))
    monkeypatch.setitem(
        sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: types.SimpleNamespace(kernel=1))
    )
    monkeypatch.setattr(displays, "is_terminal", lambda: False)
    monkeypatch.setattr(displays, "_NOTEBOOK_S", 0)
    monkeypatch.setattr(progress, "_display", None)
    assert isinstance(display_for([], in_log=False), Notebook)
    with progress.phase("Training", total=2, unit="steps") as training:
        training.advance(1)
        with progress.phase("Evaluating"):
            pass
    assert shown == ["Training  0/2 steps", "Training  1/2 steps", "Evaluating", "Training  1/2 steps", ""]


PROGRAM = """
import logging, sys, time
from fiddlex.terminal.command_line import run
from fiddlex.terminal.progress import phase

def main(argv):
    log = logging.getLogger("fiddlex")
    with phase("Training", total=40, unit="steps") as training:
        for step in range(41):
            training.advance(step, "loss 2.5000", "19,636 tokens/s", "a further detail")
            time.sleep(0.05)
            if step == 20:
                log.info("a line that is longer than the narrow terminal has columns, with a %s", "word" * 30)
                print("printed")
    print("the result")

run(main)
"""


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_the_line_of_progress_never_wraps(columns: int) -> None:
    with recorded([sys.executable, "-c", PROGRAM], ENVIRONMENT, columns=columns) as shown:
        assert shown.ended() == 0
    bars = [line for line in shown.last_lines if line.startswith("Training")]
    assert len(bars) > 1
    assert all(len(line) < columns for line in bars)
    told = [line for line in bars if line.endswith("left")]  # the last line of a slow machine may have no time
    assert ("loss 2.5000" in (told or bars)[-1]) == (columns > 40)
    assert ("━" in bars[-1]) == (columns == 200)
    *log, printed, result = shown.lines
    assert " ".join(map(str.strip, log)).split()[-3:] == ["with", "a", "word" * 30]
    assert all(len(line) <= columns or "word" in line for line in log)
    assert (printed, result) == ("printed", "the result")


def test_the_line_of_progress_follows_the_width() -> None:
    def whole() -> str:
        """The last line if it is one of progress that was read to its end."""
        line = shown.last_lines[-1] if shown.last_lines else ""
        return line if line.startswith("Training") and line.endswith("left") else ""

    endless = PROGRAM.replace("40", "1000000").replace("41", "1000000")  # it cannot end before a slow reader reads it
    stale = {**ENVIRONMENT, "COLUMNS": "80"}  # as readline sets it for the processes that its own process starts
    with recorded([sys.executable, "-c", endless], stale, columns=200) as shown:
        shown.follow(lambda: len(whole()) > 80)
        shown.resize(50)
        shown.follow(lambda: 0 < len(whole()) < 50)
        assert 0 < len(whole()) < 50


def test_a_signal_while_a_phase_begins_leaves_nothing_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal the line would stay, and the cursor would be hidden for good."""
    seen: list[int] = []

    class Interrupted(displays.Display):
        def changed(self) -> None:
            seen.append(len(progress._open))
            if len(seen) == 1:
                raise KeyboardInterrupt

    monkeypatch.setattr(progress, "_display", Interrupted())
    with pytest.raises(KeyboardInterrupt), progress.phase("Working"):
        pass
    assert seen == [1, 0]
