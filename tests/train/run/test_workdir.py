"""The files of a workdir that say what its run is."""

import os
import pathlib

import pytest

from fiddlex.config import Config
from fiddlex.errors import CheckpointError
from fiddlex.schedules.generators import make_schedule
from fiddlex.train.run.workdir import claimed, read_config, write_config


@pytest.mark.parametrize("lost", ["config.json", "schedule.csv"])
def test_a_config_takes_the_place_of_the_former_once_it_is_on_disk(
    lost: str, tiny_config: Config, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, sync = tiny_config, os.fsync
    config.pipeline.schedule = "file:/tmp/somewhere.csv"
    former, other = (make_schedule(name, pipe=2, num_microbatches=2) for name in ("gpipe", "1f1b"))
    with claimed(tmp_path, config):
        write_config(tmp_path, config, schedule=former)
    kept = (tmp_path / lost).read_text()
    assert read_config(tmp_path).pipeline.schedule == f"file:{tmp_path}/schedule.csv"

    def full(number: int) -> None:
        if pathlib.Path(f"/proc/self/fd/{number}").readlink().name == f"{lost}.tmp":
            raise OSError("the disk is full")
        sync(number)

    config.train.seed = 7
    monkeypatch.setattr(os, "fsync", full)
    with (
        pytest.raises(CheckpointError, match=r"Cannot write to .*: the disk is full"),
        claimed(tmp_path, config),
    ):
        write_config(tmp_path, config, schedule=other)
    assert (tmp_path / lost).read_text() == kept
    monkeypatch.undo()
    with claimed(tmp_path, config):
        write_config(tmp_path, config, schedule=other)
    assert (tmp_path / lost).read_text() != kept
    assert not list(tmp_path.glob("*.tmp"))
