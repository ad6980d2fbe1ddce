"""Profiles of some steps: where they are, what they have, and values that are refused."""

import gzip
import json
import pathlib
import re

import pytest

from fiddlex.config import Config
from fiddlex.config.values.profiled import check_ranks
from fiddlex.errors import ConfigError
from tests.programs import call
from tests.small_run import CONFIG, small


@pytest.mark.parametrize(
    ("steps", "ranks", "message"),
    [
        ("10", "0", r"train\.profile_steps='10' must be the first and the last step, as in 10:13, or empty"),
        ("a:b", "0", r"train\.profile_steps='a:b' must be the first and the last step"),
        ("0:3", "0", r"Steps are counted from 1"),
        ("4:3", "0", r"the last must not be before the first"),
        ("10:101", "0", r"train\.profile_steps='10:101' goes beyond the last step, train\.num_steps=100"),
        ("1:2", "0;1", r"train\.profile_ranks='0;1' must be ranks of processes, as in 0 or 0,3, or all"),
        ("1:2", "", r"train\.profile_ranks='' must be ranks"),
    ],
)
def test_other_values_are_refused(steps: str, ranks: str, message: str) -> None:
    config = Config()
    config.train.profile_steps, config.train.profile_ranks = steps, ranks
    with pytest.raises(ConfigError, match=message):
        config.validate()


def test_ranks_that_the_run_does_not_have() -> None:
    check_ranks("train.profile_ranks", "0,3", num_processes=4)
    check_ranks("train.profile_ranks", "all", num_processes=1)
    with pytest.raises(ConfigError, match=r"'1': the run has 1 process, .* Use 0 or all\."):
        check_ranks("train.profile_ranks", "1", num_processes=1)
    with pytest.raises(ConfigError, match=r"'0,4': the run has 4 processes, .* Use ranks up to 3 or all\."):
        check_ranks("train.profile_ranks", "0,4", num_processes=4)


def test_the_steps_asked_for_are_profiled_and_no_others(tmp_path: pathlib.Path, text_file: pathlib.Path) -> None:
    fields = small(text_file, train_num_steps=6, train_checkpoint_every=3, train_profile_steps="3:4")
    arguments = [f"--config={CONFIG}", f"--workdir={tmp_path}", *(f"--config.{k}={v}" for k, v in fields.items())]
    folder = tmp_path / "tensorboard" / "plugins" / "profile" / "steps-3-4"
    done = call("train", *arguments)
    assert f"Profiled steps 3 to 4: {folder}" in done.stderr
    names = sorted(path.name.partition(".")[2] for path in folder.glob("rank0-*"))
    assert names == ["trace.json.gz", "xplane.pb"]
    assert [path.name for path in (tmp_path / "tensorboard").glob(".*")] == []
    with gzip.open(next(folder.glob("*.trace.json.gz"))) as file:
        events = json.load(file)["traceEvents"]
    dispatched = [each for each in events if re.fullmatch(r"\$trainer\.py:\d+ dispatch", each.get("name", ""))]
    assert len(dispatched) == 2
    before = folder.stat().st_mtime
    again = call("train", *arguments, "--config.train.num_steps=8")
    assert "Profiled" not in again.stderr  # the run goes on after these steps
    assert folder.stat().st_mtime == before
