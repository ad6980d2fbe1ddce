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
