"""Runs a lowered schedule: one scan over the ticks of its table, inside `shard_map` over all mesh axes.

A tick has three slots, forward, backward and weight, each under a condition on what the table gives this device: an
idle device does no work. What stages send travels beside a slot: gradients of the tick before beside the forward,
activations beside the backward. The vocabulary is sharded over `pipe` × `tensor`, so all devices embed the microbatch
that enters, score the one that leaves, and take up the gradient of the one that comes back; the table says for all of
them alike when, hence collectives over `pipe` stand under those conditions and under no other.

A microbatch's residuals live from its forward to its backward in a stash whose size the table knows: memory does not
grow with the number of microbatches. Nothing here knows a schedule or a model by name.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fiddlex.pipeline.lowering import NONE, Lowered, Tick
from fiddlex.pipeline.placement import LayerPlacement
from fiddlex.pipeline.residuals import Arrays
from fiddlex.pipeline.stage import Chunk, Integer, Slot, Stage

Tree = Any


@dataclasses.dataclass(frozen=True)
class Model:
    """What the executor runs, as functions of a device's shards of the weights.

    Attributes:
      embed: `(outer, microbatch) -> x`, the same on all ranks of `pipe`.
      layer: `(layer, x, (number, microbatch)) -> x`, of the same type.
      head: `(outer, x, microbatch) -> value`, the same on all ranks of `pipe`; a scalar where it is differentiated.
      recompute: keep the inputs of layers only and run them forward again in the backward pass.
    """

    embed: Callable[[Tree, Tree], jax.Array]
    layer: Callable[[Tree, jax.Array, Any], jax.Array]
    head: Callable[[Tree, jax.Array, Tree], jax.Array]
    recompute: bool = False


class Weights(NamedTuple):
    """`layers`, stacked by row (`LayerPlacement`), and the `outer` ones of embedding and head. Gradients likewise."""

    outer: Tree
    layers: Tree


class Carry(NamedTuple):
    """What goes from tick to tick on a device."""

    stash: Arrays  # [slot, row of a chunk, …]
    weight_stash: Arrays
    forward_inbox: jax.Array  # [slot, …]
    backward_inbox: jax.Array
    outgoing: jax.Array  # the gradient that sets out in the next tick
    grads: Weights
    values: jax.Array  # of the head, [microbatch, …]


def execute(
    lowered: Lowered,
    placement: LayerPlacement,
    model: Model,
    weights: Weights,
    batch: Tree,
    *,
    scale: jax.Array | float = 1.0,
    fill: float = 0.0,
) -> tuple[jax.Array, Weights]:
    """Passes all microbatches of a batch through the model; to be called inside `shard_map`.

    Args:
      lowered: the schedule. Of one with forwards alone nothing is differentiated, and the gradients are zero.
      placement: of the layers, as `weights.layers` are stacked.
      model: what to run.
      weights: compute weights. Those replicated over an axis over which activations are sharded must be cast to varying
        (`as_varying`), since gradients are partial sums.
      batch: leaves are [example, …], a microbatch as many of them in a row as any other. They are sliced as they stand:
        reshaped to [microbatch, example, …] first, XLA would copy the arguments of the step for its loop.
      scale: what gradients are multiplied by.
      fill: what idle slots compute and memory holds at first. No result depends on it: tests fill with NaN.

    Returns:
      The values of the head, [microbatch, …], and float32 gradients of `scale` times their sum, not yet reduced over
      devices.
    """
    run = _Run(lowered, placement, model, weights, batch, scale, fill)
    table = jnp.asarray(lowered.table)
    own = lax.dynamic_index_in_dim(table, lax.axis_index("pipe"), axis=1, keepdims=False)
    carry, _ = lax.scan(lambda carry, rows: (run.tick(carry, *rows), None), run.start(), (table[:, 0], own))
    return carry.values, carry.grads


class _Run:
    """The body of the scan, for one set of weights and one batch."""

    def __init__(
        self,
        lowered: Lowered,
        placement: LayerPlacement,
        model: Model,
        weights: Weights,
        batch: Tree,
        scale: jax.Array | float,
        fill: float,
    ):
        self._lowered, self._model, self._weights, self._batch = lowered, model, weights, batch
        self._scale, self._fill = scale, fill
        self._stage = Stage(model.layer, recompute=model.recompute)
        self._chunk_of = _Chunks(placement, weights.layers)
        self._trains = lowered.stash_slots > 0
        self._splits = lowered.weight_stash_slots > 0
        whole = (lowered.column("backward_chunk") != NONE) & (lowered.column("backward_weight_stash") == NONE)
        self._has_whole = bool(whole.any())

    def start(self) -> Carry:
        """The carry before the first tick."""
        microbatch = self._microbatch(jnp.int32(0))
        # Traced for the types of their results alone; nothing uses the numbers, so that XLA drops the work.
        x = self._varying(self._model.embed(self._weights.outer, microbatch))
        value = self._model.head(self._weights.outer, lax.psum(x, "pipe"), microbatch)
        kept: tuple[Arrays, Arrays] = ([], [])
        if self._trains:
            kept = self._stage.kept(self._chunk_of(self._varying(jnp.int32(0))), x, self._varying(microbatch))
        weights = self._weights if self._trains else Weights((), ())
        lowered, rows = self._lowered, self._chunk_of.rows
        return Carry(
            stash=[self._empty(leaf, lowered.stash_slots, rows) for leaf in kept[0]],
            weight_stash=[self._empty(leaf, lowered.weight_stash_slots, rows) for leaf in kept[1]],
            forward_inbox=self._empty(x, lowered.forward_inbox_slots + 1),
            backward_inbox=self._empty(x, lowered.backward_inbox_slots + 1),
            outgoing=self._empty(x),
            grads=jax.tree.map(lambda w: jnp.zeros_like(w, jnp.float32), weights),
            values=jnp.zeros_like(jnp.broadcast_to(value, (lowered.schedule.num_microbatches, *value.shape))),
        )

    def tick(self, carry: Carry, shared_row: jax.Array, own_row: jax.Array) -> Carry:
        """One tick, in the order of `lowering.Phase`."""
        shared, own = Tick(*shared_row[: len(Tick._fields)]), Tick(*own_row[: len(Tick._fields)])
        hops = own_row[len(Tick._fields) :]
        forward_hops, backward_hops = jnp.split(hops, [len(self._lowered.forward_shifts)])
        gradients = self._send(carry.outgoing, self._lowered.backward_shifts)
        carry, y = self._forward(carry, own, self._embed(carry, shared))
        activations = self._send(y, self._lowered.forward_shifts)
        if self._lowered.scores_between:
            carry = self._head(carry, shared, own, y)
        if self._trains:
            carry = carry._replace(backward_inbox=_put(carry.backward_inbox, backward_hops, gradients))
            carry = self._backward(carry, own)
        if self._splits:
            carry = self._backward_weights(carry, own)
        if not self._lowered.scores_between:
            carry = self._head(carry, shared, own, y)
        if self._trains:
            carry = self._embed_backward(carry, shared, own)
        return carry._replace(forward_inbox=_put(carry.forward_inbox, forward_hops, activations))

    def _embed(self, carry: Carry, shared: Tick) -> jax.Array:
        def work() -> jax.Array:
            return self._varying(self._model.embed(self._weights.outer, self._microbatch(shared.embed)))

        return lax.cond(shared.embed != NONE, work, lambda: self._filled(carry.outgoing))

    def _forward(self, carry: Carry, own: Tick, embedded: jax.Array) -> tuple[Carry, jax.Array]:
        def work(stash: Arrays) -> tuple[jax.Array, Arrays]:
            arrived = lax.dynamic_index_in_dim(carry.forward_inbox, own.forward_inbox, keepdims=False)
            x = jnp.where(own.forward_inbox == NONE, embedded, arrived)
            chunk, microbatch = self._chunk_of(own.forward_chunk), self._microbatch(own.forward_microbatch)
            return self._stage.forward(chunk, x, microbatch, Slot(stash, own.forward_stash) if self._trains else None)

        y, stash = lax.cond(
            own.forward_chunk != NONE, work, lambda stash: (self._filled(carry.outgoing), stash), carry.stash
        )
        return carry._replace(stash=stash), y

    def _head(self, carry: Carry, shared: Tick, own: Tick, y: jax.Array) -> Carry:
        """Scores what leaves the last stage; with backward passes, puts the gradient of that into its inbox."""

        def work(outer: Tree, values: jax.Array) -> tuple[Tree, jax.Array, jax.Array]:
            leaving, microbatch = lax.psum(jnp.where(own.is_last, y, 0), "pipe"), self._microbatch(shared.head)
            dy = y
            if self._trains:
                value, vjp = jax.vjp(
                    lambda outer, x: self._model.head(outer, x, microbatch), self._weights.outer, leaving
                )
                douter, dy = vjp(jnp.ones_like(value) * self._scale)
                outer, dy = _added(outer, douter), self._varying(dy)
            else:
                value = self._model.head(self._weights.outer, leaving, microbatch)
            return outer, lax.dynamic_update_index_in_dim(values, value, shared.head, 0), dy

        outer, values, dy = lax.cond(
            shared.head != NONE,
            work,
            lambda outer, values: (outer, values, self._filled(y)),
            carry.grads.outer,
            carry.values,
        )
        inbox = (
            _put(carry.backward_inbox, jnp.asarray(own.head_inbox)[None], [dy])
            if self._trains
            else carry.backward_inbox
        )
        return carry._replace(grads=carry.grads._replace(outer=outer), values=values, backward_inbox=inbox)

    def _backward(self, carry: Carry, own: Tick) -> Carry:
        """B and I: takes a gradient from the inbox and leaves the one to send in `outgoing`."""

        def stashed(stash: Arrays) -> tuple[Chunk, jax.Array, Tree, Slot]:
            chunk, microbatch = self._chunk_of(own.backward_chunk), self._microbatch(own.backward_microbatch)
            dy = lax.dynamic_index_in_dim(carry.backward_inbox, own.backward_inbox, keepdims=False)
            return chunk, dy, microbatch, Slot(stash, own.backward_stash)

        def idle(weight_stash: Arrays, grads: Tree) -> tuple[jax.Array, Arrays, Tree]:
            return self._filled(carry.outgoing), weight_stash, grads

        def whole(weight_stash: Arrays, grads: Tree) -> tuple[jax.Array, Arrays, Tree]:
            dx, grads = self._stage.backward(*stashed(carry.stash), grads)
            return dx, weight_stash, grads

        def input_only(weight_stash: Arrays, grads: Tree) -> tuple[jax.Array, Arrays, Tree]:
            left = Slot(weight_stash, own.backward_weight_stash)
            return self._stage.backward_input(*stashed(carry.stash), left, grads)

        branches = [idle, *[whole] * self._has_whole, *[input_only] * self._splits]
        busy = jnp.where(own.backward_weight_stash == NONE, 1, len(branches) - 1)
        branch = jnp.where(own.backward_chunk == NONE, 0, busy)
        dx, weight_stash, grads = lax.switch(branch, branches, carry.weight_stash, carry.grads.layers)
        grads = carry.grads._replace(layers=grads)
        return carry._replace(outgoing=dx, weight_stash=weight_stash, grads=grads)

    def _embed_backward(self, carry: Carry, shared: Tick, own: Tick) -> Carry:
        def work(outer: Tree) -> Tree:
            microbatch = self._microbatch(shared.embed_backward)
            dx = lax.psum(jnp.where(own.is_first, carry.outgoing, 0), "pipe")
            vjp = jax.vjp(lambda outer: self._model.embed(outer, microbatch), self._weights.outer)[1]
            return _added(outer, *vjp(dx))

        outer = lax.cond(shared.embed_backward != NONE, work, lambda outer: outer, carry.grads.outer)
        return carry._replace(grads=carry.grads._replace(outer=outer))

    def _backward_weights(self, carry: Carry, own: Tick) -> Carry:
        def work(grads: Tree) -> Tree:
            chunk, microbatch = self._chunk_of(own.weight_chunk), self._microbatch(own.weight_microbatch)
            stash, left = Slot(carry.stash, own.weight_stash), Slot(carry.weight_stash, own.weight_weight_stash)
            return self._stage.backward_weights(chunk, carry.outgoing, microbatch, stash, left, grads)

        layers = lax.cond(own.weight_chunk != NONE, work, lambda grads: grads, carry.grads.layers)
        return carry._replace(grads=carry.grads._replace(layers=layers))

    def _send(self, x: jax.Array, shifts: tuple[int, ...]) -> list[jax.Array]:
        """What arrives here of an array that all ranks send, for each shift."""
        size = lax.axis_size("pipe")
        rings = ([(rank, (rank + shift) % size) for rank in range(size)] for shift in shifts)
        return [lax.ppermute(x, "pipe", ring) if shift else x for shift, ring in zip(shifts, rings, strict=True)]

    def _microbatch(self, number: Integer) -> Tree:
        def part(x: jax.Array) -> jax.Array:
            size = x.shape[0] // self._lowered.schedule.num_microbatches
            return lax.dynamic_slice_in_dim(x, number * size, size)

        return jax.tree.map(part, self._batch)

    def _varying(self, x: Tree) -> Tree:
        return jax.tree.map(lambda leaf: lax.pcast(leaf, "pipe", to="varying"), x)

    def _filled(self, like: jax.Array) -> jax.Array:
        return jnp.full_like(like, self._fill)

    def _empty(self, like: jax.Array, *sizes: int) -> jax.Array:
        """An array [*sizes, …] of elements of the type of `like`."""
        element = self._filled(like) if jnp.issubdtype(like.dtype, jnp.inexact) else jnp.zeros_like(like)
        return jnp.broadcast_to(element, (*sizes, *like.shape))


def _put(inbox: jax.Array, slots: jax.Array, values: list[jax.Array]) -> jax.Array:
    for number, value in enumerate(values):
        inbox = lax.dynamic_update_index_in_dim(inbox, value, slots[number], 0)
    return inbox


def _added(totals: Tree, values: Tree) -> Tree:
    return jax.tree.map(lambda total, value: total + value.astype(total.dtype), totals, values)


class _Chunks:
    """Looks up the chunks of this device by number."""

    def __init__(self, placement: LayerPlacement, layers: Tree):
        self.rows = placement.rows_per_chunk
        self._layers, self._placement = layers, placement

    def __call__(self, number: Integer) -> Chunk:
        """Chunk `number` of this device."""
        rank = lax.axis_index("pipe")
        sizes = np.asarray(self._placement.chunk_sizes())
        num_layers = jnp.asarray(sizes)[rank, number] if np.any(sizes != self.rows) else self.rows
        first = jnp.asarray(self._placement.first_layers())[rank, number]
        return Chunk(self._layers, number * self.rows, first, num_layers)
