"""What a run says when its first step is not finite: no update is to blame."""

import types
from typing import Any

import pytest

from fiddlex.config import Config, ModelConfig, TrainConfig
from fiddlex.errors import NonFiniteError
from fiddlex.train.bad_steps import BadSteps


@pytest.mark.parametrize(
    ("config", "start", "remedy"),
    [
        (
            Config(model=ModelConfig(dtype="float16", init_std=100)),
            "the initial ones",
            "a model.init_std below 100 or model.dtype=float32 in place of float16.",
        ),
        (Config(), "the initial ones", "a model.init_std below 0.02."),
        (Config(train=TrainConfig(init_from="/a")), "those of train.init_from=/a", "another run in train.init_from."),
    ],
)
def test_weights_that_overflow_before_any_update_are_to_blame(config: Config, start: str, remedy: str) -> None:
    unused: Any = None
    trainer: Any = types.SimpleNamespace(config=config, delay=0)
    error = BadSteps(trainer, unused, unused).explained(NonFiniteError("Step 1 is not finite: loss nan."), 1)
    assert isinstance(error, NonFiniteError)
    assert str(error) == (
        f"Step 1 is not finite: loss nan.\nThe weights are still {start}: no update has been made, so a lower "
        f"optimizer.learning_rate would not help. Use {remedy}"
    )
