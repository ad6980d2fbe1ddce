"""What is told of the learning rate when a run goes on with other fields."""

import re

import pytest

from fiddlex.config import Config
from fiddlex.config.overrides import replaced
from fiddlex.train.run.changed_rate import changed_rate

TEN = {
    "optimizer.learning_rate": 1.0,
    "optimizer.warmup_steps": 0,
    "optimizer.schedule": "linear",
    "train.num_steps": 10,
}


@pytest.mark.parametrize(
    ("changed", "updates", "told"),
    [
        ({"train.num_steps": 20}, 10, r"from 0.1 in update 10 to 0.5 in the next one, .* has 0: .*decay_steps=10 and "),
        ({"train.num_steps": 20}, 5, "from 0.6 in update 5 to 0.75 in the next one, .* has 0.5: "),
        ({"optimizer.learning_rate": 0.5}, 5, "from 0.6 in update 5 to 0.25 in the next one"),
        ({"train.num_steps": 20, "optimizer.decay_steps": 10}, 10, None),
        ({"optimizer.schedule": "constant", "train.num_steps": 20}, 5, "decay_steps=10 and the other fields"),
        ({"train.num_steps": 20}, 0, None),
        ({"train.seed": 1}, 5, None),
    ],
)
def test_a_jump_of_the_learning_rate_is_told_with_both_rates(
    changed: dict[str, object], updates: int, told: str | None
) -> None:
    saved = replaced(Config(), TEN)
    text = changed_rate(saved, replaced(saved, changed), updates)
    assert re.search(told, text) if told else not text


def test_no_decay_is_proposed_for_a_constant_rate() -> None:
    saved = replaced(Config(), TEN | {"optimizer.schedule": "constant"})
    text = changed_rate(saved, replaced(saved, {"optimizer.learning_rate": 0.5}), 5)
    assert text.endswith("To keep that schedule, set the other fields of the optimizer as they were.")
