"""Arrays stacked by slot, row or batch, read and changed in place."""

import jax
import jax.numpy as jnp
from jax import lax

from fiddlex.pipeline.stage import Integer, Tree


def put(inbox: jax.Array, slots: jax.Array, values: list[jax.Array]) -> jax.Array:
    """An inbox with values put into slots."""
    for number, value in enumerate(values):
        inbox = lax.dynamic_update_index_in_dim(inbox, value, slots[number], 0)
    return inbox


def added(totals: Tree, values: Tree, place: Integer) -> Tree:
    """`totals` [batch, …] with `values` added at a place."""

    def add(total: jax.Array, value: jax.Array) -> jax.Array:
        value = lax.dynamic_index_in_dim(total, place, keepdims=False) + value.astype(total.dtype)
        return lax.dynamic_update_index_in_dim(total, value, place, 0)

    return jax.tree.map(add, totals, values)


def with_rows(stacked: Tree, rows: Tree, first: Integer) -> Tree:
    """`stacked` [row, …] with others in place of the rows from `first` on."""
    return jax.tree.map(lambda x, new: lax.dynamic_update_slice_in_dim(x, new, first, 0), stacked, rows)


def flat(layers: Tree) -> Tree:
    """[version or batch, row, …] as [row, …], those of the first before those of the second."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), layers)


def like(flat: Tree, stacked: Tree) -> Tree:
    """The inverse of `flat`, into the shapes of `stacked`."""
    return jax.tree.map(lambda x, like: x.reshape(like.shape), flat, stacked)


def zeros(like: jax.Array, size: int) -> jax.Array:
    """So many arrays of zeros of the type of `like`, [size, …]."""
    return jnp.zeros_like(jnp.broadcast_to(like, (size, *like.shape)))
