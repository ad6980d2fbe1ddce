import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

from fiddlex.cluster.mesh import make_mesh
from fiddlex.config import MeshConfig
from fiddlex.models import dropout
from fiddlex.models.dropout import ATTENTION_OUTPUT_SITE, MLP_OUTPUT_SITE, Dropout, example_keys


def masks(site: int, layer: int, *, step: int = 0, seed: int = 0, rate: float = 0.25, tensor: int = 1) -> np.ndarray:
    """Dropped ones, [4 examples, 64 positions, 96 features], the sequence cut over `tensor`."""

    drawn = drawing(site, rate, tensor, dropout.MOST_AT_ONCE)
    return np.asarray(drawn(*(jnp.int32(number) for number in (layer, step, seed))))


@functools.cache
def drawing(site: int, rate: float, tensor: int, most_at_once: int) -> Callable[..., jax.Array]:
    """The masks of a layer, a step and a seed, compiled; `most_at_once` is `dropout.MOST_AT_ONCE`."""

    def draw(layer: jax.Array, step: jax.Array, seed: jax.Array) -> jax.Array:
        keys = example_keys(jax.random.key(seed), step, jnp.arange(4))
        ones = jnp.ones((4, 64 // tensor, 96))
        return Dropout(rate, keys, layer).residual(ones, site, ("tensor",) * (tensor > 1))

    mesh = make_mesh(MeshConfig(tensor=tensor))
    return jax.jit(jax.shard_map(draw, mesh=mesh, in_specs=P(), out_specs=P(None, "tensor")))


def test_rate_and_scale() -> None:
    mask = masks(MLP_OUTPUT_SITE, 0)
    assert set(np.unique(mask)) == {np.float32(0), np.float32(1 / 0.75)}
    assert abs((mask == 0).mean() - 0.25) < 4 * np.sqrt(0.25 * 0.75 / mask.size)


def test_every_coordinate_draws_its_own_mask() -> None:
    base = masks(MLP_OUTPUT_SITE, 0) == 0
    others = [
        masks(ATTENTION_OUTPUT_SITE, 0),
        masks(MLP_OUTPUT_SITE, 1),
        masks(MLP_OUTPUT_SITE, 0, step=1),
        masks(MLP_OUTPUT_SITE, 0, seed=1),
        np.roll(masks(MLP_OUTPUT_SITE, 0), 1, axis=0),
        np.roll(masks(MLP_OUTPUT_SITE, 0), 1, axis=1),
    ]
    chance = 2 * 0.25 * 0.75  # two independent masks differ in this share of elements
    for other in others:
        assert abs(((other == 0) != base).mean() - chance) < 0.02


def test_cutting_the_sequence_changes_no_mask() -> None:
    np.testing.assert_array_equal(masks(MLP_OUTPUT_SITE, 2, tensor=4), masks(MLP_OUTPUT_SITE, 2))


def test_64_bits_change_no_mask() -> None:
    plain = masks(MLP_OUTPUT_SITE, 1) == 0
    with jax.enable_x64(True):
        np.testing.assert_array_equal(masks(MLP_OUTPUT_SITE, 1) == 0, plain)


def test_drawing_in_parts_changes_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = masks(MLP_OUTPUT_SITE, 1)
    monkeypatch.setattr(dropout, "MOST_AT_ONCE", 10 * 96)  # ten positions, which leave a rest
    np.testing.assert_array_equal(masks(MLP_OUTPUT_SITE, 1), whole)


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 5, 7), (4, 8, 96), (3, 16, 128)])
def test_masks_read_from_bits_are_those_drawn_again(shape: tuple[int, ...]) -> None:
    """In values and gradients."""

    def both(x: jax.Array, redraws: bool) -> tuple[jax.Array, jax.Array]:
        keys = example_keys(jax.random.key(0), jnp.int32(0), jnp.arange(shape[0]))
        drop, x = Dropout(0.25, keys, redraws=redraws), jax.lax.pcast(x, "tensor", to="varying")
        draw = drop.attention if x.ndim == 4 else functools.partial(drop.residual, site=1, axes=())
        y, pull = jax.vjp(draw, x)
        return jax.lax.pmean((y, pull(jnp.full_like(y, 3.0))[0]), "tensor")

    x = jnp.arange(1, np.prod(shape) + 1, dtype=jnp.float32).reshape(shape)
    (y, dx), again = (
        jax.jit(
            jax.shard_map(
                functools.partial(both, redraws=redraws),
                mesh=make_mesh(MeshConfig()),
                in_specs=P(),
                out_specs=(P(), P()),
            )
        )(x)
        for redraws in (False, True)
    )
    assert set(np.unique(y / x).round(5)) <= {np.float32(0), np.float32(1 / 0.75).round(5)}
    np.testing.assert_array_equal(np.asarray(dx), np.where(np.asarray(y) == 0, 0, np.float32(3) / np.float32(0.75)))
    jax.tree.map(np.testing.assert_array_equal, (y, dx), again)
