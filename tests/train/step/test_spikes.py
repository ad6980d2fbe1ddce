"""What counts as a spike, and what is usual."""

import jax.numpy as jnp
import numpy as np
import pytest

from fiddlex.train.step.spikes import Usual, is_spike, next_usual, start_usual


def after(losses: list[float]) -> Usual:
    usual = start_usual()
    for loss in losses:
        usual = next_usual(usual, jnp.float32(loss), jnp.float32(2 * loss), good=jnp.bool(True))
    return usual


def test_what_is_usual_is_first_the_mean_then_a_running_one() -> None:
    usual = after([1.0, 2.0, 6.0])
    assert (float(usual.loss), float(usual.grad_norm), int(usual.good_steps)) == (3.0, 6.0, 3)
    usual = after([1.0] * 100 + [3.0] * 50)
    assert float(usual.loss) == pytest.approx(3 - 2 * 0.98**50, rel=1e-5)


@pytest.mark.parametrize(
    ("loss", "norm", "spike"), [(2.9, 1.0, False), (3.1, 1.0, True), (1.0, 5.9, False), (1.0, 6.1, True)]
)
def test_a_spike_is_above_the_bound(loss: float, norm: float, spike: bool) -> None:
    assert bool(is_spike(after([1.0] * 20), jnp.float32(loss), jnp.float32(norm), bound=3.0)) is spike
    assert not is_spike(after([1.0] * 19), jnp.float32(loss), jnp.float32(norm), bound=3.0)  # too early to tell


def test_only_good_steps_change_what_is_usual() -> None:
    usual = after([1.0] * 5)
    for value in (100.0, np.nan):
        bad = next_usual(usual, jnp.float32(value), jnp.float32(value), good=jnp.bool(False))
        assert [float(each) for each in bad] == [float(each) for each in usual]
