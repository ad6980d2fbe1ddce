"""The loss scale of batches under way, step by step."""

import jax.numpy as jnp
import numpy as np

from fiddlex.config import OptimizerConfig
from fiddlex.config.sections import MOST_LOSS_SCALE
from fiddlex.train.step.scaling import Scaling, fit, next_scaling, start_scaling


def followed(config: OptimizerConfig, scaling: Scaling, finite: list[bool]) -> list[tuple[list[float], int]]:
    """Scales and good steps after each of some steps."""
    found = []
    for each in finite:
        scaling = next_scaling(scaling, jnp.bool_(each), config)
        found.append((np.asarray(scaling.scales).tolist(), int(scaling.good_steps)))
    return found


def test_two_batches_with_one_scale_halve_it_once_and_a_window_doubles_it() -> None:
    config = OptimizerConfig(loss_scale=8.0, loss_scale_window=2)
    start = start_scaling(config, delay=1)
    assert np.asarray(start.scales).tolist() == [8, 8]
    assert followed(config, start, [False, False, True, True, True, True, False]) == [
        ([8, 4], 0),
        ([4, 4], 0),  # overflowed at 8, as the batch before it did
        ([4, 4], 1),
        ([4, 8], 0),
        ([8, 8], 1),
        ([8, 16], 0),
        ([16, 4], 0),  # half of the 8 that overflowed
    ]


def test_the_scale_of_one_batch_at_a_time_halves_at_each_overflow_and_has_a_highest() -> None:
    config = OptimizerConfig(loss_scale=8.0, loss_scale_window=1)
    assert followed(config, start_scaling(config, delay=0), [False, False, True]) == [([4], 0), ([2], 0), ([4], 0)]
    highest = Scaling(jnp.full(1, MOST_LOSS_SCALE, jnp.float32), jnp.int32(0))
    assert followed(config, highest, [True]) == [([MOST_LOSS_SCALE], 0)]


def test_another_delay_takes_the_newest_scale_for_those_to_come() -> None:
    scaling = Scaling(jnp.asarray([8.0, 4.0]), jnp.int32(1))
    assert np.asarray(fit(scaling, delay=2).scales).tolist() == [8, 4, 4]
    assert np.asarray(fit(scaling, delay=0).scales).tolist() == [8]
