"""The config with which the weights of a run are evaluated and sampled from."""

import pathlib
from typing import Any

import pytest

from fiddlex.config import Config
from fiddlex.config.overrides import override, replaced
from fiddlex.config.values.every import Every
from fiddlex.errors import ConfigError
from fiddlex.train.run.transfer.result import result_config


@pytest.mark.parametrize(
    ("fields", "overrides"),
    [
        ({"on_spike": "stop"}, []),  # as versions before 2026-11-24 saved it
        ({"mean_time_to_failure_h": 24.0, "checkpoint_overhead": 0.1, "checkpoint_every": 500}, []),
        ({"checkpoint_every": "auto", "checkpoint_overhead": 0.1}, ["train.checkpoint_every=0"]),
        ({"on_spike": "stop", "spike_bound": 4.0}, ["train.spike_bound=0"]),
    ],
)
def test_fields_that_change_nothing_are_read_from_a_workdir(
    fields: dict[str, Any], overrides: list[str], tiny_config: Config, tmp_path: pathlib.Path
) -> None:
    for name, value in fields.items():
        setattr(tiny_config.train, name, value)
    (tmp_path / "config.json").write_text(tiny_config.to_json())
    changes = [each.partition("=") for each in overrides]
    changed = replaced(
        tiny_config, {path: Every(value) if "every" in path else float(value) for path, _, value in changes}
    )
    with pytest.raises(ConfigError, match="it changes nothing"):
        changed.validate()
    _, config = result_config(tmp_path, lambda saved: override(saved, *overrides))
    config.validate()


@pytest.mark.parametrize(
    ("run", "overrides", "warns"),
    [
        (
            {"eval_fraction": 0.05},
            ["data.eval_fraction=0.5"],
            "trained on 95% of stdlib, and now only 50% are not held",
        ),
        ({"eval_fraction": 0.05}, ["data.eval_fraction=0.01"], ""),
        ({"eval_fraction": 0.05}, ["data.eval_fraction=0.5", "data.source=text:other"], ""),
        ({"eval_source": "text:other"}, ["data.eval_source=", "data.eval_fraction=0.25"], "trained on 100% of stdlib"),
        (
            {"source": "megatron:a", "split": "8,2"},
            ["data.split=6,2"],
            "trained on 80% of megatron:a, and now only 75%",
        ),
    ],
)
def test_what_a_run_trained_on_is_not_scored_in_silence(
    run: dict[str, Any],
    overrides: list[str],
    warns: str,
    tiny_config: Config,
    tmp_path: pathlib.Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tiny_config.data.source = "stdlib"
    for name, value in run.items():
        setattr(tiny_config.data, name, value)
    (tmp_path / "config.json").write_text(tiny_config.to_json())
    result_config(tmp_path, lambda saved: override(saved, *overrides))
    assert warns in caplog.text
    assert bool(warns) == bool(caplog.text)
