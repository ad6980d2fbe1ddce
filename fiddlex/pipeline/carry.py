"""The state of a device between ticks, and the order of a tick's copies beside its slots of work."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fiddlex.pipeline import stacks
from fiddlex.pipeline.host_stash import together
from fiddlex.pipeline.residuals import Arrays

Tree = Any


class PipelineWeights(NamedTuple):
    """Weights or gradients: `layers`, stacked by row (`LayerPlacement`), and `outer` (embedding, head)."""

    outer: Tree
    layers: Tree


class Carry(NamedTuple):
    """The state of a device that passes from tick to tick."""

    stash: Arrays  # [slot, row of a chunk, …]
    weight_stash: Arrays
    host_stash: Arrays  # on the host, like `stash`; empty if nothing is spilled
    forward_inbox: jax.Array  # [slot, …]
    backward_inbox: jax.Array
    outgoing: jax.Array  # the gradient to send in the next tick
    grads: PipelineWeights  # sums, leaves [batch, …]
    finished: Tree  # complete and reduced gradients of layers, leaves [batch, row, …]
    values: jax.Array  # values of the head, [microbatch, …]
    losses: Arrays  # sums of what this rank's layers add to these values (`layer_losses`), none or one of [microbatch]
    cache: Arrays  # `Cache.new`


def with_losses(values: jax.Array, losses: Arrays) -> jax.Array:
    """Values of the head; where layers add to them, float32 [microbatch, 2]: the sum, and what the layers add."""
    if not losses:
        return values
    added = lax.psum(losses[0], "pipe")
    return jnp.stack([values + added, added], axis=-1)


def with_layers(carry: Carry, flat: Tree) -> Carry:
    """`carry` with these sums of the gradients of layers, [row, …] (`stacks.flat`)."""
    return carry._replace(grads=carry.grads._replace(layers=stacks.like(flat, carry.grads.layers)))


def after_spill(carry: Carry, y: jax.Array, gradients: list[jax.Array]) -> tuple[Carry, jax.Array, list[jax.Array]]:
    """Makes head and backward slot wait for the spill and arriving gradients: both copies start before the forward."""
    outer, host, y, gradients = together((carry.grads.outer, carry.host_stash, y, gradients))
    return carry._replace(grads=carry.grads._replace(outer=outer), host_stash=host), y, gradients


def after_fetch(carry: Carry, activations: list[jax.Array], fetched: Arrays) -> tuple[Carry, list[jax.Array], Arrays]:
    """Makes what follows the backward slot wait for the fetch and arriving activations, which run beside that slot."""
    arrived = activations, fetched
    outer, outgoing, arrived = together((carry.grads.outer, carry.outgoing, arrived))
    return carry._replace(grads=carry.grads._replace(outer=outer), outgoing=outgoing), *arrived
