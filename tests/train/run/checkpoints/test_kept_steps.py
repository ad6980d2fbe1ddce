"""Which checkpoints are kept, and what happens when the rule changes."""

import contextlib
import pathlib
import re
from collections.abc import Sequence
from typing import NamedTuple

import pytest

from fiddlex.config import Config, TrainConfig
from fiddlex.errors import ConfigError
from fiddlex.train import loop
from fiddlex.train.run.checkpoints.checkpoint import Checkpoints
from fiddlex.train.run.checkpoints.kept_steps import Kept, check_keeps


class Checkpoint(NamedTuple):
    step: int


@pytest.mark.parametrize(
    ("last", "every", "steps", "kept"),
    [
        (2, 0, (1, 2, 3), [2, 3]),
        (5, 0, (1, 2, 3), [1, 2, 3]),
        (2, 10, (4, 8, 12, 16, 20, 24, 28, 32, 36), [12, 20, 32, 36]),
        (2, 1000, (500, 990, 1490, 1990, 2490), [1490, 1990, 2490]),
    ],
)
def test_the_newest_are_kept_and_the_first_of_each_span(
    last: int, every: int, steps: Sequence[int], kept: list[int]
) -> None:
    flags = Kept(last, every).should_preserve([Checkpoint(step) for step in steps], context=None)
    assert [step for step, flag in zip(steps, flags, strict=True) if flag] == kept


def test_a_run_does_not_start_that_would_delete_what_it_has_kept(tiny_config: Config, tmp_path: pathlib.Path) -> None:
    config, folder = tiny_config, tmp_path / "checkpoints"
    config.train.num_steps, config.train.checkpoint_every, config.train.keep_every = 8, 1, 3
    loop.train(config, tmp_path)
    assert Checkpoints(tmp_path).steps() == [3, 6, 7, 8]
    config.train.num_steps, config.train.keep_every = 10, 6
    text = (
        "train.keep_every=6: with train.keep_every=3 the run has kept the checkpoint of step 3, which the next save "
        f"would delete. Set train.keep_every=3 again; or move them out of {folder} or delete them"
    )
    with pytest.raises(ConfigError, match=re.escape(text)):
        loop.train(config, tmp_path)
    assert Checkpoints(tmp_path).steps() == [3, 6, 7, 8]
    (folder / "3").rename(tmp_path / "3")
    loop.train(config, tmp_path)
    assert Checkpoints(tmp_path).steps() == [6, 9, 10]


@pytest.mark.parametrize(("last", "lost"), [(2, "steps 3, 6"), (3, "step 3"), (4, "")])
def test_the_next_save_is_one_of_the_newest(last: int, lost: str, tmp_path: pathlib.Path) -> None:
    for step in (3, 6, 9):
        (tmp_path / str(step)).mkdir()
    saved, config = TrainConfig(keep_every=3), TrainConfig(keep_last=last, num_steps=20)
    told = pytest.raises(ConfigError, match=f"{lost}, which the next save would delete")
    with told if lost else contextlib.nullcontext():
        check_keeps(saved, config, tmp_path)
    config.num_steps = 9  # no save comes
    if last == 3:
        check_keeps(saved, config, tmp_path)
