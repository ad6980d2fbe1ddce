"""The order in memory of what a stage leaves in the stash."""

import jax
import jax.numpy as jnp
import pytest

from fiddlex.pipeline.stage import Tile, in_row_major


@pytest.mark.parametrize(
    ("shape", "tile", "pinned"),
    [
        ((4, 3, 5), (1, 1), True),
        ((7,), (1, 1), True),
        ((2, 32, 128), (8, 128), True),
        ((2, 32, 64), (8, 128), False),  # would be padded to 128
        ((2, 12, 128), (8, 128), False),
        ((128,), (8, 128), True),
        ((4, 3, 5), None, False),
    ],
)
def test_what_would_not_be_padded_is_pinned(shape: tuple[int, ...], tile: Tile, pinned: bool) -> None:
    text = jax.jit(lambda x: in_row_major([x], tile)[0]).lower(jnp.ones(shape, jnp.bfloat16)).as_text()
    assert ("LayoutConstraint" in text) == pinned


def test_random_keys_have_no_order() -> None:
    text = jax.jit(lambda keys: in_row_major(keys, (1, 1))).lower(jax.random.split(jax.random.key(0), 8)).as_text()
    assert "LayoutConstraint" not in text
