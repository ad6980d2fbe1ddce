"""What a rank of some mesh axes is to have of an array, from what it has."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fiddlex.flax.operations import SUM, Cut, Place
from fiddlex.parallel.collectives import as_varying_over


def moved_to(x: Any, given: Place, wanted: Place, axes: tuple[str, ...]) -> Any:
    """The array of which a rank of `axes` has `given`, as `wanted`; the ranks exchange what that takes."""
    if given == wanted:
        return x
    if given == SUM:
        if not isinstance(wanted, Cut):
            return lax.psum(x, axes)
        pieces, axis = _pieces(x, wanted)
        return _joined(lax.psum_scatter(pieces, axes, scatter_dimension=axis, tiled=True), axis, wanted)
    if isinstance(given, Cut):
        pieces, axis = _pieces(x, given)
        if wanted == SUM:
            size = pieces.shape[axis]
            shape = (*pieces.shape[:axis], size * lax.axis_size(axes), *pieces.shape[axis + 1 :])
            first = lax.axis_index(axes) * size
            return _joined(
                lax.dynamic_update_slice_in_dim(jnp.zeros_like(x, shape=shape), pieces, first, axis), axis, given
            )
        x = _joined(lax.all_gather(pieces, axes, axis=axis, tiled=True, to="invarying"), axis, given)
    if wanted is None:
        return x
    x = as_varying_over(x, frozenset(axes))
    if not isinstance(wanted, Cut):
        return jnp.where(lax.axis_index(axes) == 0, x, jnp.zeros_like(x))
    pieces, axis = _pieces(x, wanted)
    size = pieces.shape[axis] // lax.axis_size(axes)
    return _joined(lax.dynamic_slice_in_dim(pieces, lax.axis_index(axes) * size, size, axis), axis, wanted)


def _pieces(x: jax.Array, place: Cut) -> tuple[jax.Array, int]:
    """The array with its pieces along a dimension of their own, and the dimension along which these are cut."""
    if place.pieces == 1:
        return x, place.dimension
    before, after = x.shape[: place.dimension], x.shape[place.dimension + 1 :]
    size = x.shape[place.dimension] // place.pieces
    return x.reshape(*before, place.pieces, size, *after), place.dimension + 1


def _joined(pieces: jax.Array, axis: int, place: Cut) -> jax.Array:
    """The inverse of `_pieces`."""
    if axis == place.dimension:
        return pieces
    return pieces.reshape(*pieces.shape[: axis - 1], place.pieces * pieces.shape[axis], *pieces.shape[axis + 1 :])
