"""The loss scale from step to step, against what its docstring says."""

import jax.numpy as jnp
import pytest

from fiddlex.config import MOST_LOSS_SCALE, OptimizerConfig
from fiddlex.train.scaling import Scaling, fit, next_scaling, start_scaling

CONFIG = OptimizerConfig(loss_scale=64.0, loss_scale_window=3)


def after(scaling: Scaling, *finite: bool) -> list[list[float]]:
    """The scales after each of some steps, whose gradients were finite or not."""
    scales = []
    for each in finite:
        scaling = next_scaling(scaling, jnp.bool_(each), CONFIG)
        scales.append(scaling.scales.tolist())
    return scales


def test_batches_under_way_with_the_scale_that_overflowed_halve_it_once() -> None:
    three = after(start_scaling(CONFIG, 3), False, False, False)
    assert three == [[64, 64, 32], [64, 32, 32], [32, 32, 32]]  # all three batches were begun with 64
    assert after(Scaling(jnp.array([32.0, 32, 32]), jnp.int32(0)), False) == [[32, 32, 16]]  # and with 32, once more


def test_one_batch_at_a_time_halves_its_scale_at_every_overflow() -> None:
    assert after(start_scaling(CONFIG, 1), False, False, True, False) == [[32], [16], [16], [8]]


def test_an_overflow_of_a_batch_with_a_larger_scale_leaves_a_smaller_one_as_it_is() -> None:
    assert after(Scaling(jnp.array([64.0, 8]), jnp.int32(2)), False) == [[8, 8]]


@pytest.mark.parametrize("overflow", [0, 1, 2])
def test_it_grows_after_so_many_updates_in_a_row(overflow: int) -> None:
    finite = [True] * overflow + [False] + [True] * 4
    scales = after(start_scaling(CONFIG, 1), *finite)
    assert scales == [[64]] * overflow + [[32]] * 3 + [[64]] * 2


def test_it_grows_no_further_than_the_most() -> None:
    full = Scaling(jnp.full(1, MOST_LOSS_SCALE, jnp.float32), jnp.int32(2))
    assert after(full, True) == [[MOST_LOSS_SCALE]]


def test_more_batches_under_way_begin_with_the_newest_scale() -> None:
    scaling = Scaling(jnp.array([64.0, 32]), jnp.int32(1))
    assert fit(scaling, 4).scales.tolist() == [64, 32, 32, 32]
    assert fit(scaling, 1).scales.tolist() == [64]
