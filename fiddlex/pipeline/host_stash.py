"""The stash's second memory: arrays of the host, to which values of the stash are copied and from which they return.

In every tick, a spill copies a slot of the stash to a slot of the host, and a fetch copies another slot back. A tick
with nothing to copy copies all the same, to or from the last slot of the host, the trash: XLA copies whole arrays, here
on the host, when they pass through a conditional or a loop of zero or more turns. The spill is beside the forward slot
(`together`), the fetch beside the backward and the weight slot. As the fetch reads what the spill has written, XLA
never holds two versions of an array of the host. docs/memory.md reports what XLA makes of this.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fiddlex.parallel.collectives import axes_of
from fiddlex.pipeline.residuals import Arrays
from fiddlex.pipeline.stage import Integer, in_turn
from fiddlex.schedules.table import NONE

Tree = Any


def empty(tree: Tree, *sizes: int) -> Tree:
    """Arrays [*sizes, …] of the host, one for each leaf of `tree`, whose values are whatever is in memory."""

    def allocated(leaf: jax.Array) -> jax.Array:
        array = lax.empty((*sizes, *leaf.shape), leaf.dtype)
        return jax.device_put(lax.pcast(array, tuple(axes_of(leaf)), to="varying"), jax.memory.Space.Host)

    return jax.tree.map(allocated, tree)


@jax.named_scope("spill")
def spilled(host: Arrays, stash: Arrays, *, source: Integer, target: Integer) -> Arrays:
    """`host` with slot `source` of `stash` in its slot `target`; in its trash, if `target` is NONE."""
    return [
        lax.dynamic_update_slice_in_dim(
            array, jax.device_put(_slot(leaf, source), jax.memory.Space.Host), _or_trash(array, target), 0
        )
        for array, leaf in zip(host, stash, strict=True)
    ]


@jax.named_scope("fetch")
def fetched_slot(host: Arrays, source: Integer, *, after: jax.Array) -> Arrays:
    """Slot `source` of `host` on the device, [1, …], once `after` is computed; the trash's if `source` is NONE."""
    # XLA:GPU schedules a program without its optimization barriers, so that only data can make a copy wait: the slot's
    # number depends on `after` as far as XLA can tell. Arrays that vary over fewer mesh axes are few numbers.
    late = source + jnp.minimum(jnp.isnan(after[(0,) * after.ndim]).astype(jnp.int32), 0)

    def copied(array: jax.Array) -> jax.Array:
        number = late if axes_of(after) <= axes_of(array) else source
        return jax.device_put(_slot(array, _or_trash(array, number)), jax.memory.Space.Device)

    return [copied(array) for array in host]


@jax.named_scope("fetch")
def with_fetched(stash: Arrays, values: Arrays, target: Integer) -> Arrays:
    """`stash` with a `fetched_slot` in its slot `target`, if that is not NONE."""

    def put(turn: jax.Array, leaves: Arrays) -> Arrays:
        slot = in_turn(target, turn)
        return [lax.dynamic_update_slice_in_dim(leaf, x, slot, 0) for leaf, x in zip(leaves, values, strict=True)]

    return lax.fori_loop(0, jnp.where(target == NONE, 0, 1), put, stash)


def together(tree: Tree) -> Tree:
    """`tree`, no array of which anything uses before all are computed."""
    leaves, structure = jax.tree.flatten(tree)
    # The arrays of an optimization barrier vary over the same mesh axes, so that each set of axes has its own barrier.
    for axes in dict.fromkeys(map(axes_of, leaves)):  # in one order in all processes
        numbers = [number for number, leaf in enumerate(leaves) if axes_of(leaf) == axes]
        for number, leaf in zip(numbers, lax.optimization_barrier([leaves[n] for n in numbers]), strict=True):
            leaves[number] = leaf
    return jax.tree.unflatten(structure, leaves)


def _slot(array: jax.Array, number: Integer) -> jax.Array:
    return lax.dynamic_slice_in_dim(array, number, 1)


def _or_trash(array: jax.Array, slot: Integer) -> jax.Array:
    return jnp.where(slot == NONE, len(array) - 1, slot)
