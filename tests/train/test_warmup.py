"""The warning of a run that ends before its learning rate has risen."""

import pathlib

import pytest

from fiddlex.train.loop import train
from tests.small_run import config_of, small


def test_only_a_run_that_trains_is_warned(
    tmp_path: pathlib.Path, text_file: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(small(text_file, train_num_steps=2, train_checkpoint_every=2, optimizer_warmup_steps=5))
    for number, step in ((1, "first"), (0, "a run that has ended already")):
        caplog.clear()
        assert train(config, tmp_path).step == 2
        text = "optimizer.warmup_steps=5 is longer than the run, train.num_steps=2"
        assert sum(text in message for message in caplog.messages) == number, step
