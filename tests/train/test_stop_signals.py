"""Which signals ask a run to stop, and which are left alone."""

import contextlib
import io
import logging
import pathlib
import signal
import sys
from collections.abc import Iterator

import pytest

from fiddlex.terminal.interrupts import STOP_SIGNALS
from fiddlex.train.run.faults.stop_signals import StopSignals


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)  # not the end of the tests, if the run does not handle it
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what it runs in the background ignore it
    yield
    for number, handler in zip(STOP_SIGNALS, before, strict=True):
        signal.signal(number, handler)


@contextlib.contextmanager
def begun() -> Iterator[StopSignals]:
    """The signals of a run that has taken a step."""
    with StopSignals() as stop:
        assert stop.goes_on(0)
        yield stop


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_the_first_signal_is_received_and_handlers_are_put_back(number: signal.Signals) -> None:
    signal.signal(number, before := lambda *_: None)
    with begun() as stop:
        assert stop.received is None
        signal.raise_signal(number)
        signal.raise_signal(signal.SIGHUP)  # a launcher or terminal may send more
        assert stop.received == number
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])  # ignored under nohup, and in mpirun's script
def test_a_run_ignores_what_it_was_started_to_ignore(number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_IGN)
    with begun() as stop:
        signal.raise_signal(number)
        assert stop.received is None
    assert signal.getsignal(number) == signal.SIG_IGN


def test_before_the_first_step_a_signal_ends_the_run_at_once() -> None:
    with StopSignals() as stop, pytest.raises(SystemExit, match=r"^143$"):
        signal.raise_signal(signal.SIGTERM)
    assert stop.received == signal.SIGTERM


def test_ctrl_c_again_stops_at_once() -> None:
    with begun() as stop:
        signal.raise_signal(signal.SIGHUP)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert stop.received == signal.SIGHUP


def test_a_signal_in_the_midst_of_a_line_of_the_log_is_received(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler has something to say itself, and a stream takes nothing while it is being written."""

    class Interrupted(io.FileIO):
        def write(self, data: bytes) -> int:  # type: ignore[override]
            signal.raise_signal(signal.SIGTERM)
            return super().write(data)

    log = logging.getLogger("fiddlex")
    with (
        io.TextIOWrapper(io.BufferedWriter(Interrupted(tmp_path / "log", "w")), line_buffering=True) as stream,
        begun() as stop,
    ):
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(log, "handlers", [logging.StreamHandler(stream)])
        monkeypatch.setattr(log, "propagate", False)
        monkeypatch.setattr(log, "level", logging.INFO)
        log.info("a line")
        assert stop.received == signal.SIGTERM
        log.info("another")
    assert (tmp_path / "log").read_text() == "a line\nanother\n"
