"""The commands that a run names at its end."""

import importlib.util
import pathlib

import pytest

from fiddlex.config import Config
from fiddlex.train.run.records.next_commands import next_commands


@pytest.fixture
def workdir(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A workdir with a checkpoint and an event file; TensorBoard is not installed."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    workdir = tmp_path / "my run"
    (workdir / "checkpoints").mkdir(parents=True)
    (workdir / "tensorboard").mkdir()
    (workdir / "tensorboard" / "events.out").touch()
    return workdir


def test_a_run_of_the_standard_library(workdir: pathlib.Path) -> None:
    config = Config()
    config.data.source = "stdlib"
    assert next_commands(config, workdir, program="fiddlex train") == [
        "Next:",
        f"  fiddlex evaluate --workdir='{workdir}'",
        f"  fiddlex generate --workdir='{workdir}' --prompt='def '",
        f"  tensorboard --logdir='{workdir}/tensorboard'  # pip install tensorboard",
    ]


def test_a_script_is_followed_by_scripts(
    workdir: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.executable", f"{tmp_path}/.venv/bin/python")
    config = Config()
    config.data.source, config.model.vocab_size = "tokens:/no/text", 1000  # whose tokenizer is not known
    assert next_commands(config, workdir, program="experiments/train.py")[:3] == [
        "Next:",
        f"  .venv/bin/python experiments/evaluate.py --workdir='{workdir}'",
        f"  tensorboard --logdir='{workdir}/tensorboard'  # pip install tensorboard",
    ]


def test_bert_generates_nothing(workdir: pathlib.Path) -> None:
    config = Config()
    config.model.family, config.model.objective = "bert", "mlm"
    lines = next_commands(config, workdir, program="fiddlex train")
    assert not any("fiddlex generate" in line for line in lines)


def test_a_run_that_has_left_nothing(tmp_path: pathlib.Path) -> None:
    assert next_commands(Config(), tmp_path, program="fiddlex train") == []
