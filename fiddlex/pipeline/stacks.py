"""Functions that read and update in place arrays that are stacked by slot, row or batch."""

import jax
import jax.numpy as jnp
from jax import lax

from fiddlex.pipeline.stage import Integer, Tree


@jax.named_scope("inbox")
def put(inbox: jax.Array, slots: jax.Array, values: list[jax.Array]) -> jax.Array:
    for number, value in enumerate(values):
        inbox = lax.dynamic_update_index_in_dim(inbox, value, slots[number], 0)
    return inbox


@jax.named_scope("gradients")
def added(totals: Tree, values: Tree, place: Integer) -> Tree:
    """`totals` [batch, …] with `values` added at index `place`."""

    def add(total: jax.Array, value: jax.Array) -> jax.Array:
        value = lax.dynamic_index_in_dim(total, place, keepdims=False) + value.astype(total.dtype)
        return lax.dynamic_update_index_in_dim(total, value, place, 0)

    return jax.tree.map(add, totals, values)


def with_rows(stacked: Tree, rows: Tree, first: Integer) -> Tree:
    """`stacked` [row, …] with the rows from `first` on replaced by `rows`."""
    return jax.tree.map(lambda x, new: lax.dynamic_update_slice_in_dim(x, new, first, 0), stacked, rows)


def flat(layers: Tree) -> Tree:
    """Reshapes [version or batch, row, …] to [row, …], all rows of the first version or batch first."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), layers)


def like(flat: Tree, stacked: Tree) -> Tree:
    """The inverse of `flat`: reshapes arrays to the shapes of `stacked`."""
    return jax.tree.map(lambda x, like: x.reshape(like.shape), flat, stacked)


def zeros(like: jax.Array, size: int) -> jax.Array:
    """`size` arrays of zeros of the type of `like`, [size, …]."""
    return jnp.zeros_like(jnp.broadcast_to(like, (size, *like.shape)))
