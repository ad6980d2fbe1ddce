"""What takes too long is reported, with the stacks of all threads, and goes on."""

import pathlib
import threading
import time
from typing import Any

import pytest

from fiddlex.config import Config
from fiddlex.train import loop
from fiddlex.train.run.faults.watchdog import Watchdog
from fiddlex.train.step.feed import Feed
from fiddlex.train.step.stopwatch import Activity, Stopwatch


def test_a_step_that_blocks_is_reported_once_and_goes_on(
    tiny_config: Config, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = Feed.train

    def block_on_data(self: Feed, start_step: int) -> Any:
        for number, batch in enumerate(original(self, start_step), start_step):
            if number == 3:
                time.sleep(5)
            yield batch

    monkeypatch.setattr(Feed, "train", block_on_data)
    tiny_config.train.step_timeout_s = 3  # other steps take less on a busy machine too
    assert loop.train(tiny_config, tmp_path).step == 5
    (message,) = (text for text in caplog.messages if text.startswith("Step 3 has taken"))
    (path,) = (path for path in (tmp_path / "stacks").glob("rank0-*.txt") if f"{path}" in message)
    assert message == (
        "Step 3 has taken 3 s so far, more than train.step_timeout_s=3; this process is waiting for the next batch. "
        f"The stacks of its threads are in {path}."
    )
    text = path.read_text()
    assert text.startswith(f"Rank 0: {message.partition(' The stacks')[0]}\n")
    assert "block_on_data" in text
    assert text.count("hread 0x") > 2  # the loader's threads too


def test_what_is_watched_anew_has_its_whole_time(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    watch = Stopwatch()
    with Watchdog(tmp_path, 0.4, watch) as watchdog:
        for step in range(8):
            watchdog.begin(f"Step {step}")
            time.sleep(0.1)
        watchdog.begin("")
        time.sleep(0.6)
        assert not caplog.messages
        watch.begin(Activity.CHECKPOINTS)
        watchdog.begin("The checkpoint of step 8")
        time.sleep(1)
    (message,) = caplog.messages
    assert "The checkpoint of step 8 has taken" in message
    assert "this process is saving a checkpoint." in message


def test_stacks_that_cannot_be_written_are_told(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "stacks").write_text("")
    with Watchdog(tmp_path, 0.1, Stopwatch()) as watchdog:
        watchdog.begin("Step 1")
        time.sleep(0.4)
    (message,) = caplog.messages
    assert f"could not be written to {tmp_path}/stacks/rank0-" in message


def test_a_timeout_of_0_watches_nothing(tmp_path: pathlib.Path) -> None:
    before = threading.active_count()
    with Watchdog(tmp_path, 0, Stopwatch()) as watchdog:
        watchdog.begin("Step 1")
        assert threading.active_count() == before
