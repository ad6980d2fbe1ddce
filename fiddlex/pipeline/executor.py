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
from fiddlex.pipeline.windows import Renames, Windows

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
    grads: Weights  # leaves [batch, …]
    values: jax.Array  # of the head, [microbatch, …]


class Flight(NamedTuple):
    """What is in flight between two windows, on a device (`windows`)."""

    carry: Carry
    slots: Renames  # where each slot that the table names lies, for each memory [slot]; the trash of an inbox is last


class Call(NamedTuple):
    """What changes from call to call, as arrays: none of it compiles anything anew.

    Attributes:
      table: int32 [tick, rank, column], of which `num_ticks` are run.
      num_ticks: int32 scalar.
      renames: of slots after the call, each int32 [rank, slot].
      newest: which of the stacked versions of the weights is the newest, int32 scalar; the one before it is one older.
      sums: which of the stacked sums of gradients is that of the window's batch; the next batch's is behind it.
    """

    table: jax.Array
    num_ticks: jax.Array
    renames: Renames
    newest: jax.Array
    sums: jax.Array


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
      lowered: the schedule. Of one with forwards alone nothing is differentiated, and there are no gradients.
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
    versions = jax.tree.map(lambda w: w[None], weights)
    scales = jnp.asarray(scale)[None]
    run = _Run(lowered, placement, model, versions, batch, scales, lowered.schedule.num_microbatches, fill=fill)
    table = jnp.asarray(lowered.table)
    own = lax.dynamic_index_in_dim(table, lax.axis_index("pipe"), axis=1, keepdims=False)
    carry, _ = lax.scan(lambda carry, rows: (run.tick(carry, *rows), None), run.start(), (table[:, 0], own))
    return carry.values, jax.tree.map(lambda g: g[0], carry.grads)


class Pipeline:
    """A pipeline that goes on from call to call, for use inside `shard_map`.

    Args:
      windows: of its schedule and semantics.
      placement: of the layers.
      model: what to run.
      versions: compute weights as in `execute`, leaves [version, …].
      batch: leaves are [example, …]: of the window's batch, then of those that may start in it.
      scales: float32 [batch], what the gradients of each are multiplied by.
    """

    def __init__(
        self,
        windows: Windows,
        placement: LayerPlacement,
        model: Model,
        versions: Weights,
        batch: Tree,
        scales: jax.Array,
    ):
        self._windows, self._batch_size = windows, windows.semantics.batch_size
        self._run = _Run(windows.lowered, placement, model, versions, batch, scales, self._batch_size)

    def start(self) -> Flight:
        """An empty pipeline."""
        sizes = self._windows.sizes._replace(
            forward_inbox=self._windows.sizes.forward_inbox + 1, backward_inbox=self._windows.sizes.backward_inbox + 1
        )
        slots = [lax.pcast(jnp.arange(size, dtype=jnp.int32), "pipe", to="varying") for size in sizes]
        return Flight(self._run.start(), Renames(*slots))

    def call(self, flight: Flight, call: Call) -> tuple[Flight, jax.Array, Weights]:
        """Runs a window.

        Returns:
          What is in flight then, and of the window's batch the values of the head [microbatch, …] and the gradients, as
          `execute` gives them.
        """
        rank = lax.axis_index("pipe")
        self._run.newest, self._run.sums, self._run.slots = call.newest, call.sums, flight.slots

        def body(tick: jax.Array, carry: Carry) -> Carry:
            rows = lax.dynamic_index_in_dim(call.table, tick, keepdims=False)
            return self._run.tick(carry, rows[0], lax.dynamic_index_in_dim(rows, rank, keepdims=False))

        carry = lax.fori_loop(0, call.num_ticks, body, flight.carry)
        done = call.sums % len(jax.tree.leaves(carry.grads)[0])
        grads = jax.tree.map(lambda g: lax.dynamic_index_in_dim(g, done, keepdims=False), carry.grads)
        emptied = jax.tree.map(lambda g: lax.dynamic_update_index_in_dim(g, jnp.zeros_like(g[0]), done, 0), carry.grads)
        later = jnp.zeros_like(carry.values[: self._batch_size])
        values = jnp.concatenate([carry.values[self._batch_size :], later])
        slots = [now[_of_rank(rename, rank)] for now, rename in zip(flight.slots, call.renames, strict=True)]
        return (
            Flight(carry._replace(grads=emptied, values=values), Renames(*slots)),
            carry.values[: self._batch_size],
            grads,
        )


def _of_rank(rename: jax.Array, rank: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(rename, rank, keepdims=False)


class _Run:
    """What happens in a tick.

    Attributes:
      newest, sums: see `Call`.
      slots: see `Flight`; None where the slots that the table names are the slots.
    """

    newest: Integer = 0
    sums: Integer = 0
    slots: Renames | None = None

    def __init__(
        self,
        lowered: Lowered,
        placement: LayerPlacement,
        model: Model,
        versions: Weights,
        batch: Tree,
        scales: jax.Array,
        batch_size: int,
        *,
        fill: float = 0.0,
    ):
        self._lowered, self._placement, self._model = lowered, placement, model
        self._versions, self._batch, self._scales, self._batch_size = versions, batch, scales, batch_size
        self._fill = fill
        self._stage = Stage(model.layer, recompute=model.recompute)
        self._trains = lowered.stash_slots > 0
        self._splits = lowered.weight_stash_slots > 0
        whole = (lowered.column("backward_chunk") != NONE) & (lowered.column("backward_weight_stash") == NONE)
        self._has_whole = bool(whole.any())

    def start(self) -> Carry:
        """The carry before the first tick."""
        microbatch = self._microbatch(jnp.int32(0))
        # Traced for the types of their results alone; nothing uses the numbers, so that XLA drops the work.
        outer = self._outer(0)
        x = self._varying(self._model.embed(outer, microbatch))
        value = self._model.head(outer, lax.psum(x, "pipe"), microbatch)
        kept: tuple[Arrays, Arrays] = ([], [])
        if self._trains:
            first = self._varying(jnp.int32(0))
            kept = self._stage.kept(self._chunk(first, first, first), x, self._varying(microbatch))
        weights = jax.tree.map(lambda w: w[0], self._versions) if self._trains else Weights((), ())
        lowered, rows, num_batches = self._lowered, self._placement.rows_per_chunk, len(self._scales)
        return Carry(
            stash=[self._empty(leaf, lowered.stash_slots, rows) for leaf in kept[0]],
            weight_stash=[self._empty(leaf, lowered.weight_stash_slots, rows) for leaf in kept[1]],
            forward_inbox=self._empty(x, lowered.forward_inbox_slots + 1),
            backward_inbox=self._empty(x, lowered.backward_inbox_slots + 1),
            outgoing=self._empty(x),
            grads=jax.tree.map(lambda w: _zeros(w.astype(jnp.float32), num_batches), weights),
            values=_zeros(value, num_batches * self._batch_size),
        )

    def tick(self, carry: Carry, shared_row: jax.Array, own_row: jax.Array) -> Carry:
        """One tick, in the order of `lowering.Phase`."""
        shared, own = Tick(*shared_row[: len(Tick._fields)]), Tick(*own_row[: len(Tick._fields)])
        hops = own_row[len(Tick._fields) :]
        forward_hops, backward_hops = jnp.split(hops, [len(self._lowered.forward_shifts)])
        if self.slots is not None:
            own, forward_hops, backward_hops = _renamed(own, forward_hops, backward_hops, self.slots)
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
            return self._varying(self._model.embed(self._outer(shared.embed_version), self._microbatch(shared.embed)))

        return lax.cond(shared.embed != NONE, work, lambda: self._filled(carry.outgoing))

    def _forward(self, carry: Carry, own: Tick, embedded: jax.Array) -> tuple[Carry, jax.Array]:
        def work(stash: Arrays) -> tuple[jax.Array, Arrays]:
            arrived = lax.dynamic_index_in_dim(carry.forward_inbox, own.forward_inbox, keepdims=False)
            x = jnp.where(own.forward_inbox == NONE, embedded, arrived)
            chunk = self._chunk(own.forward_chunk, own.forward_version, own.forward_microbatch)
            microbatch = self._microbatch(own.forward_microbatch)
            return self._stage.forward(chunk, x, microbatch, Slot(stash, own.forward_stash) if self._trains else None)

        y, stash = lax.cond(
            own.forward_chunk != NONE, work, lambda stash: (self._filled(carry.outgoing), stash), carry.stash
        )
        return carry._replace(stash=stash), y

    def _head(self, carry: Carry, shared: Tick, own: Tick, y: jax.Array) -> Carry:
        """Scores what leaves the last stage; with backward passes, puts the gradient of that into its inbox."""

        def work(outer: Tree, values: jax.Array) -> tuple[Tree, jax.Array, jax.Array]:
            leaving, microbatch = lax.psum(jnp.where(own.is_last, y, 0), "pipe"), self._microbatch(shared.head)
            weights, dy = self._outer(shared.head_version), y
            if self._trains:
                value, vjp = jax.vjp(lambda outer, x: self._model.head(outer, x, microbatch), weights, leaving)
                douter, dy = vjp(jnp.ones_like(value) * self._scales[self._batch_of(shared.head)])
                outer, dy = _added(outer, douter, self._sum_of(shared.head)), self._varying(dy)
            else:
                value = self._model.head(weights, leaving, microbatch)
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
            chunk = self._chunk(own.backward_chunk, own.backward_version, own.backward_microbatch)
            microbatch = self._microbatch(own.backward_microbatch)
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
        dx, weight_stash, layers = lax.switch(branch, branches, carry.weight_stash, _flat(carry.grads.layers))
        return carry._replace(outgoing=dx, weight_stash=weight_stash, grads=_with_layers(carry.grads, layers))

    def _embed_backward(self, carry: Carry, shared: Tick, own: Tick) -> Carry:
        def work(outer: Tree) -> Tree:
            microbatch = self._microbatch(shared.embed_backward)
            dx = lax.psum(jnp.where(own.is_first, carry.outgoing, 0), "pipe")
            vjp = jax.vjp(lambda outer: self._model.embed(outer, microbatch), self._outer(0))[1]  # linear in them
            return _added(outer, *vjp(dx), self._sum_of(shared.embed_backward))

        outer = lax.cond(shared.embed_backward != NONE, work, lambda outer: outer, carry.grads.outer)
        return carry._replace(grads=carry.grads._replace(outer=outer))

    def _backward_weights(self, carry: Carry, own: Tick) -> Carry:
        def work(grads: Tree) -> Tree:
            chunk = self._chunk(own.weight_chunk, own.weight_version, own.weight_microbatch)
            microbatch = self._microbatch(own.weight_microbatch)
            stash, left = Slot(carry.stash, own.weight_stash), Slot(carry.weight_stash, own.weight_weight_stash)
            return self._stage.backward_weights(chunk, carry.outgoing, microbatch, stash, left, grads)

        layers = lax.cond(own.weight_chunk != NONE, work, lambda grads: grads, _flat(carry.grads.layers))
        return carry._replace(grads=_with_layers(carry.grads, layers))

    def _send(self, x: jax.Array, shifts: tuple[int, ...]) -> list[jax.Array]:
        """What arrives here of an array that all ranks send, for each shift."""
        size = lax.axis_size("pipe")
        rings = ([(rank, (rank + shift) % size) for rank in range(size)] for shift in shifts)
        return [lax.ppermute(x, "pipe", ring) if shift else x for shift, ring in zip(shifts, rings, strict=True)]

    def _microbatch(self, number: Integer) -> Tree:
        def part(x: jax.Array) -> jax.Array:
            size = x.shape[0] // (len(self._scales) * self._batch_size)
            return lax.dynamic_slice_in_dim(x, number * size, size)

        return jax.tree.map(part, self._batch)

    def _batch_of(self, microbatch: Integer) -> Integer:
        """0 for the window's batch, 1 for the next."""
        return microbatch // self._batch_size

    def _sum_of(self, microbatch: Integer) -> Integer:
        """Where the gradients for a microbatch are added up."""
        return (self.sums + self._batch_of(microbatch)) % len(self._scales)

    def _outer(self, version: Integer) -> Tree:
        place = self._place_of(version)
        return jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, place, keepdims=False), self._versions.outer)

    def _place_of(self, version: Integer) -> Integer:
        return (self.newest - version) % len(jax.tree.leaves(self._versions.layers)[0])

    def _chunk(self, number: Integer, version: Integer, microbatch: Integer) -> Chunk:
        """Chunk `number` of this device, with weights of a version and the place of a microbatch's gradients."""
        rank, rows, placement = lax.axis_index("pipe"), self._placement.rows_per_chunk, self._placement
        sizes = np.asarray(placement.chunk_sizes())
        all_rows = rows * placement.num_chunks
        return Chunk(
            _flat(self._versions.layers),
            row=self._place_of(version) * all_rows + number * rows,
            grad_row=self._sum_of(microbatch) * all_rows + number * rows,
            layer=jnp.asarray(placement.first_layers())[rank, number],
            num_layers=jnp.asarray(sizes)[rank, number] if np.any(sizes != rows) else rows,
        )

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


def _renamed(
    own: Tick, forward_hops: jax.Array, backward_hops: jax.Array, slots: Renames
) -> tuple[Tick, jax.Array, jax.Array]:
    """A row of the table with slots where they lie now."""

    def place(memory: jax.Array, slot: Any) -> Any:
        return jnp.where(slot == NONE, NONE, memory[slot])

    return (
        own._replace(
            head_inbox=place(slots.backward_inbox, own.head_inbox),
            forward_inbox=place(slots.forward_inbox, own.forward_inbox),
            forward_stash=place(slots.stash, own.forward_stash),
            backward_inbox=place(slots.backward_inbox, own.backward_inbox),
            backward_stash=place(slots.stash, own.backward_stash),
            backward_weight_stash=place(slots.weight_stash, own.backward_weight_stash),
            weight_stash=place(slots.stash, own.weight_stash),
            weight_weight_stash=place(slots.weight_stash, own.weight_weight_stash),
        ),
        place(slots.forward_inbox, forward_hops),
        place(slots.backward_inbox, backward_hops),
    )


def _added(totals: Tree, values: Tree, place: Integer) -> Tree:
    """`totals` [batch, …] with `values` added at a place."""

    def add(total: jax.Array, value: jax.Array) -> jax.Array:
        value = lax.dynamic_index_in_dim(total, place, keepdims=False) + value.astype(total.dtype)
        return lax.dynamic_update_index_in_dim(total, value, place, 0)

    return jax.tree.map(add, totals, values)


def _flat(layers: Tree) -> Tree:
    """[version or batch, row, …] as [row, …]."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), layers)


def _with_layers(grads: Weights, layers: Tree) -> Weights:
    return grads._replace(layers=jax.tree.map(lambda x, like: x.reshape(like.shape), layers, grads.layers))


def _zeros(like: jax.Array, size: int) -> jax.Array:
    return jnp.zeros_like(jnp.broadcast_to(like, (size, *like.shape)))
