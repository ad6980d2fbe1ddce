import re
from typing import Any

import pytest

from fiddlex.config import TrainConfig
from fiddlex.errors import ConfigError


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"mean_time_to_failure_h": 24.0, "checkpoint_every": 500},
            "train.mean_time_to_failure_h=24.0 with train.checkpoint_every=500: it changes nothing. Set "
            "train.checkpoint_every to auto, or train.mean_time_to_failure_h to 0.0.",
        ),
        (
            {"checkpoint_overhead": 0.1},
            "train.checkpoint_overhead=0.1 with train.checkpoint_every=0: it changes nothing. Set "
            "train.checkpoint_every to auto, or train.checkpoint_overhead to 0.035.",
        ),
        (
            {"checkpoint_every": "auto", "mean_time_to_failure_h": 24.0, "checkpoint_overhead": 0.1},
            "train.checkpoint_overhead=0.1 with train.mean_time_to_failure_h=24.0: it changes nothing. Set "
            "train.mean_time_to_failure_h to 0, or train.checkpoint_overhead to 0.035.",
        ),
        (
            {"on_spike": "stop"},
            "train.on_spike=stop with train.spike_bound=0.0: it changes nothing. Set train.spike_bound to 4, for "
            "example, or train.on_spike to skip.",
        ),
    ],
)
def test_fields_that_would_change_nothing_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        TrainConfig(**fields).validate()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"checkpoint_every": "auto", "mean_time_to_failure_h": 24.0},
        {"checkpoint_every": "auto", "checkpoint_overhead": 0.1},
        {"checkpoint_every": 500, "checkpoint_overhead": 0.035},
        {"spike_bound": 4.0, "on_spike": "stop"},
    ],
)
def test_fields_that_change_something_are_taken(fields: dict[str, Any]) -> None:
    TrainConfig(**fields).validate()
