"""What a device does in one tick of a lowered schedule, inside `shard_map` over all mesh axes.

A tick has three slots: forward, backward and weight. Each is a loop over the layers of a chunk, of no turns if the
table gives this device no work. Sends can overlap with a slot: the previous tick's gradients travel during the forward,
this tick's activations during the backward. The vocabulary is sharded over `pipe` × `tensor`, so all devices embed,
score and backpropagate through the embedding together. The table's columns for these three actions are the same on all
devices, so only these actions may contain collectives over `pipe`.

A loop of zero or more turns, not a conditional, updates what the carry holds: XLA:GPU copies whole arrays, in every
tick, when they pass through a conditional.

A stash holds a microbatch's residuals from its forward to the end of its backward (B or W), partly on the host if the
table has spills (`host_stash`). The table determines the size of the stash, so memory does not grow with the number of
microbatches. Where several batches are in flight, versions of weights and sums of gradients are stacked: a batch's
index is its number modulo the size of the stack. No code here depends on the name of a schedule or a model.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fiddlex.parallel.host_memory import fetched
from fiddlex.pipeline import host_stash, stacks
from fiddlex.pipeline.carry import Carry, PipelineWeights, after_fetch, after_spill, with_layers
from fiddlex.pipeline.codec import Codec
from fiddlex.pipeline.stage import Cache, CachedLayer, Chunk, Integer, Kept, Slot, Stage, Tile, in_row_major, in_turn
from fiddlex.schedules.pipeline_spec import PipelineSpec
from fiddlex.schedules.placement import LayerPlacement
from fiddlex.schedules.table import BACKWARD_HOPS, FORWARD_HOPS, NONE, Tick, accesses
from fiddlex.schedules.weight_stream import CHUNKS_HELD
from fiddlex.schedules.windows import Renames

Tree = Any


@dataclasses.dataclass(frozen=True)
class PipelineModel:
    """The model that the executor runs, as functions of a device's shards of the weights."""

    embed: Callable[[Tree, Tree], jax.Array]  # (outer, microbatch) -> x, the same on all ranks of `pipe`
    # (layer, x, (number, microbatch)) -> y, of the type of x, or (y, loss)
    layer: Callable[[Tree, jax.Array, Any], Any]
    # (outer, x, microbatch) -> value; if it is differentiated, a scalar that is the same on all ranks of `pipe`
    head: Callable[[Tree, jax.Array, Tree], jax.Array]
    cached_layer: CachedLayer | None = None  # in decoding, in place of `layer`
    recompute: bool = False  # save only the inputs of layers, and rerun the layers in the backward pass
    tile: Tile = None  # for the stash and for complete gradients, before and after they are reduced (`in_row_major`)
    codec: Codec | None = None  # how the stash holds activations; None: as they are

    @functools.cached_property
    def stage(self) -> Stage:
        """The passes through the layers; all engines of the model share them, so that each pass is traced once."""
        return Stage(self.layer, self.cached_layer, recompute=self.recompute, tile=self.tile, codec=self.codec)


class Between(NamedTuple):
    """What happens to rows of layers, [row, …], between their turns."""

    reduce: Callable[[Tree], Tree] = lambda grads: grads  # sums complete gradients over devices
    fetch: Callable[[Tree], Tree] = fetched  # makes weights that wait elsewhere whole on the device


NOTHING_BETWEEN = Between()


@dataclasses.dataclass(frozen=True)
class Engine:
    """Runs the ticks of one train step."""

    spec: PipelineSpec
    placement: LayerPlacement  # by which `versions.layers` are stacked
    model: PipelineModel
    # compute weights [version, …]: those after k updates at k modulo their number; streamed: the layers of two chunks
    versions: PipelineWeights
    batch: Tree  # leaves [example, …]: the examples of all batches in flight, one batch after another
    scales: jax.Array  # the factors that multiply the gradients of each batch, float32 [batch]
    step: Integer = 0  # the number of the step's own batch, which equals the number of steps done
    head_versions: Tree | None = None  # the versions of `outer` with which the head runs; None: those of `versions`
    slots: Renames | None = None  # the actual slot for each slot number in the table; None: the number itself
    cache: Cache | None = None
    between: Between = NOTHING_BETWEEN
    fill: float = 0.0  # the output of idle slots, and the initial value of memory

    def start(self) -> Carry:
        microbatch = self._microbatch(jnp.int32(0))
        # The lines below are traced only for types; nothing uses the values, so XLA removes the computation.
        outer = self._outer(0)
        x = self._varying(self.model.embed(outer, microbatch))
        value = self.model.head(self._outer(0, of_head=True), lax.psum(x, "pipe"), microbatch)
        kept = Kept([], [], [])
        grads, finished = PipelineWeights((), ()), ()
        sizes, slots, rows = self.spec.sizes, self.spec.sizes.slots, self.placement.rows_per_chunk
        if self.spec.trains:
            first = self._varying(jnp.int32(0))
            chunk = self._chunk(first, first, first)
            kept = self.model.stage.kept(chunk, x, self._varying(microbatch), splits=self.spec.splits)
            weights = jax.tree.map(lambda w: w[0].astype(jnp.float32), self.versions)
            if sizes.streamed:
                weights = weights._replace(layers=jax.tree.map(lambda w: w[:rows], weights.layers))
            with jax.named_scope("gradients"):
                outer_sums, sums = (
                    jax.tree.map(functools.partial(stacks.zeros, size=size), part)
                    for size, part in ((sizes.outer_sums, weights.outer), (sizes.sums, weights.layers))
                )
                grads = PipelineWeights(outer_sums, sums)
                if sizes.finished:
                    reduced = self.between.reduce(weights.layers)
                    finished = jax.tree.map(functools.partial(stacks.zeros, size=sizes.finished), reduced)
        with jax.named_scope("stash"):  # both, since XLA may make arrays of one shape by one instruction
            stash, weight_stash = (
                [self._empty(leaf, size, rows) for leaf in leaves]
                for leaves, size in zip(kept[:2], (slots.stash, slots.weight_stash), strict=True)
            )
        return Carry(
            stash=stash,
            weight_stash=weight_stash,
            host_stash=host_stash.empty(kept.stash, slots.host_stash, rows) if slots.host_stash else [],
            forward_inbox=self._empty(x, slots.forward_inbox),
            backward_inbox=self._empty(x, slots.backward_inbox),
            outgoing=self._empty(x),
            grads=grads,
            finished=finished,
            values=stacks.zeros(value, sizes.batches * self.spec.batch_size),
            losses=[stacks.zeros(loss, sizes.batches * self.spec.batch_size) for loss in kept.losses],
            cache=self.cache.new if self.cache else [],
        )

    def tick(self, carry: Carry, shared_row: jax.Array, own_row: jax.Array) -> Carry:
        """One tick, in the order of `table.TickPhase`."""
        spec = self.spec
        shared, own = Tick(*shared_row[: len(Tick._fields)]), Tick(*own_row[: len(Tick._fields)])
        hops = own_row[len(Tick._fields) :]
        forward_hops, backward_hops = jnp.split(hops, [len(spec.forward_shifts)])
        if self.slots is not None:
            own, forward_hops, backward_hops = _renamed(own, forward_hops, backward_hops, self.slots)
        gradients = self._send(carry.outgoing, spec.backward_shifts)
        spills = bool(spec.sizes.slots.host_stash)
        if spills:
            host = host_stash.spilled(carry.host_stash, carry.stash, source=own.spill_stash, target=own.spill_host)
            carry = carry._replace(host_stash=host)
        carry, y = self._forward(carry, own, self._embed(carry, shared))
        if spills:
            carry, y, gradients = after_spill(carry, y, gradients)
            fetched = host_stash.fetched_slot(carry.host_stash, own.fetch_host, after=y)
        activations = self._send(y, spec.forward_shifts)
        if spec.scores_between:
            carry = self._head(carry, shared, own, y)
        if spec.trains:
            carry = carry._replace(backward_inbox=stacks.put(carry.backward_inbox, backward_hops, gradients))
            carry = self._backward(carry, own)
        if spec.splits:
            carry = self._backward_weights(carry, own)
        if spills:
            carry, activations, fetched = after_fetch(carry, activations, fetched)
        if not spec.scores_between:
            carry = self._head(carry, shared, own, y)
        if spec.trains:
            carry = self._embed_backward(carry, shared, own)
        if spills:
            carry = carry._replace(stash=host_stash.with_fetched(carry.stash, fetched, own.fetch_stash))
        return carry._replace(forward_inbox=stacks.put(carry.forward_inbox, forward_hops, activations))

    @jax.named_scope("embed")
    def _embed(self, carry: Carry, shared: Tick) -> jax.Array:
        def work() -> jax.Array:
            return self._varying(self.model.embed(self._outer(shared.embed_version), self._microbatch(shared.embed)))

        return lax.cond(shared.embed != NONE, work, lambda: self._filled(carry.outgoing))

    @jax.named_scope("forward")
    def _forward(self, carry: Carry, own: Tick, embedded: jax.Array) -> tuple[Carry, jax.Array]:
        arrived = lax.dynamic_index_in_dim(carry.forward_inbox, own.forward_inbox, keepdims=False)
        x = self._unless_idle(own.forward_chunk, jnp.where(own.forward_inbox == NONE, embedded, arrived))
        chunk = self._chunk(own.forward_chunk, own.forward_version, own.forward_microbatch)
        microbatch = self._microbatch(own.forward_microbatch)
        if self.cache is not None:
            cache = self.cache._replace(new=carry.cache)
            y, new = self.model.stage.forward_cached(chunk, x, microbatch, cache)
            return carry._replace(cache=new), y
        slot = Slot(carry.stash, own.forward_stash) if self.spec.trains else None
        number = own.forward_microbatch
        losses = [lax.dynamic_index_in_dim(each, number, keepdims=False) for each in carry.losses]
        y, stash, losses = self.model.stage.forward(chunk, x, microbatch, slot, losses)
        pairs = zip(carry.losses, losses, strict=True)
        losses = [lax.dynamic_update_index_in_dim(each, total, number, 0) for each, total in pairs]
        return carry._replace(stash=stash, losses=losses), y

    @jax.named_scope("head")
    def _head(self, carry: Carry, shared: Tick, own: Tick, y: jax.Array) -> Carry:
        """Scores the output of the last stage; in training, puts that output's gradient into the last stage's inbox."""

        def score(number: jax.Array, outer: Tree, values: jax.Array, y: jax.Array) -> tuple[Tree, jax.Array, jax.Array]:
            leaving, microbatch = lax.psum(jnp.where(own.is_last, y, 0), "pipe"), self._microbatch(number)
            weights = self._outer(shared.head_version, of_head=True)
            if self.spec.trains:
                value, vjp = jax.vjp(lambda outer, x: self.model.head(outer, x, microbatch), weights, leaving)
                douter, dx = vjp(jnp.ones_like(value) * self.scales[self._batch_of(number)])
                outer = stacks.added(outer, douter, self._place(number, self.spec.sizes.outer_sums))
            else:
                value, dx = self.model.head(weights, leaving, microbatch), leaving
            return outer, lax.dynamic_update_index_in_dim(values, value, number, 0), self._varying(dx)

        outer, values, dy = _if_any(shared.head, score, carry.grads.outer, carry.values, y)
        carry = carry._replace(grads=carry.grads._replace(outer=outer), values=values)
        if not self.spec.trains:
            return carry
        return carry._replace(backward_inbox=stacks.put(carry.backward_inbox, jnp.asarray(own.head_inbox)[None], [dy]))

    @jax.named_scope("backward")
    def _backward(self, carry: Carry, own: Tick) -> Carry:
        """B and I: takes a gradient from the inbox and writes its result, to be sent, into `outgoing`."""
        stage, microbatch = self.model.stage, self._microbatch(own.backward_microbatch)
        stash, left = Slot(carry.stash, own.backward_stash), Slot(carry.weight_stash, own.backward_left)
        arrived = lax.dynamic_index_in_dim(carry.backward_inbox, own.backward_inbox, keepdims=False)
        dx, layers = self._unless_idle(own.backward_chunk, arrived), stacks.flat(carry.grads.layers)
        is_whole = jnp.asarray(own.backward_left) == NONE

        def chunk(runs: jax.Array) -> Chunk:
            number = jnp.where(runs, own.backward_chunk, NONE)
            return self._chunk(number, own.backward_version, own.backward_microbatch)

        if self.spec.has_whole:
            dx, layers = stage.backward(chunk(is_whole), dx, microbatch, stash, layers)
        if self.spec.splits:
            with jax.named_scope("input_only"):
                dx, leaves, layers = stage.backward_input(chunk(~is_whole), dx, microbatch, stash, left, layers)
            carry = carry._replace(weight_stash=leaves)
        carry = with_layers(carry, layers)._replace(outgoing=dx)
        if not self.spec.has_whole:
            return carry
        with jax.named_scope("backward_finish"):
            return self._finish(carry, own.backward_finishes, own.backward_chunk, own.backward_microbatch)

    @jax.named_scope("embed_backward")
    def _embed_backward(self, carry: Carry, shared: Tick, own: Tick) -> Carry:
        def add(number: jax.Array, outer: Tree, outgoing: jax.Array) -> tuple[Tree, jax.Array]:
            microbatch = self._microbatch(number)
            dx = lax.psum(jnp.where(own.is_first, outgoing, 0), "pipe")
            weights = self._outer(shared.embed_backward_version)
            vjp = jax.vjp(lambda outer: self.model.embed(outer, microbatch), weights)[1]
            (douter,) = vjp(dx)
            outer = stacks.added(outer, douter, self._place(number, self.spec.sizes.outer_sums))
            return outer, self._varying(dx)

        outer, _ = _if_any(shared.embed_backward, add, carry.grads.outer, carry.outgoing)
        return carry._replace(grads=carry.grads._replace(outer=outer))

    @jax.named_scope("weights")
    def _backward_weights(self, carry: Carry, own: Tick) -> Carry:
        chunk = self._chunk(own.weight_chunk, own.weight_version, own.weight_microbatch)
        microbatch = self._microbatch(own.weight_microbatch)
        stash, left = Slot(carry.stash, own.weight_stash), Slot(carry.weight_stash, own.weight_left)
        layers = stacks.flat(carry.grads.layers)
        layers = self.model.stage.backward_weights(chunk, carry.outgoing, microbatch, stash, left, layers)
        carry = with_layers(carry, layers)
        with jax.named_scope("weight_finish"):
            return self._finish(carry, own.weight_finishes, own.weight_chunk, own.weight_microbatch)

    def _send(self, x: jax.Array, shifts: tuple[int, ...]) -> list[jax.Array]:
        """The arrays that arrive here when all ranks send `x`, one array for each shift."""
        size = lax.axis_size("pipe")
        rings = ([(rank, (rank + shift) % size) for rank in range(size)] for shift in shifts)
        return [lax.ppermute(x, "pipe", ring) if shift else x for shift, ring in zip(shifts, rings, strict=True)]

    def _microbatch(self, number: Integer) -> Tree:
        def part(x: jax.Array) -> jax.Array:
            size = x.shape[0] // (len(self.scales) * self.spec.batch_size)
            if size == x.shape[0]:
                # A slice of all rows would not depend on the number, and XLA would move the work on it out of the loop
                # of `_if_any`. No work reads the row that is added.
                x = jnp.concatenate([x, x[:1]])
            return lax.dynamic_slice_in_dim(x, number * size, size)

        return jax.tree.map(part, self.batch)

    def _batch_of(self, microbatch: Integer) -> Integer:
        """0 for a microbatch of the step's own batch, 1 for a microbatch of the next batch."""
        return microbatch // self.spec.batch_size

    def _place(self, microbatch: Integer, size: int) -> Integer:
        """The index of the microbatch's batch in a stack of `size`."""
        return (self.step + self._batch_of(microbatch)) % size if size > 1 else 0

    def _version(self, age: Integer) -> Integer:
        """The index, in the stack of versions, of the weights that are `age` updates old."""
        size = self.spec.sizes.versions
        return (self.step - age) % size if size > 1 else 0

    def _outer(self, age: Integer, *, of_head: bool = False) -> Tree:
        """Embedding and head, `age` updates old: those with which the embedding runs, or the head."""
        place, versions = self._version(age), self.versions.outer
        if of_head and self.head_versions is not None:
            versions = self.head_versions
        return jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, place, keepdims=False), versions)

    def _chunk(self, number: Integer, age: Integer, microbatch: Integer) -> Chunk:
        """Chunk `number` of this device, with weights `age` updates old; without layers if `number` is NONE."""
        rank, placement = lax.axis_index("pipe"), self.placement
        sizes = np.asarray(placement.chunk_sizes())
        return Chunk(
            stacks.flat(self.versions.layers),
            row=self._row(self._version(age), number, num_chunks=CHUNKS_HELD),
            grad_row=self._row(self._place(microbatch, self.spec.sizes.sums), number, num_chunks=1),
            layer=jnp.asarray(placement.first_layers())[rank, number],
            num_layers=jnp.where(number == NONE, 0, jnp.asarray(sizes)[rank, number]),
        )

    def _row(self, place: Integer, number: Integer, *, num_chunks: int) -> Integer:
        """The first row of chunk `number` in stacked arrays, at index `place` of the stack."""
        if self.spec.sizes.streamed:
            # There is no stack: the arrays have the rows of `num_chunks` chunks, in turn.
            return number % num_chunks * self.placement.rows_per_chunk
        return place * self.placement.rows_per_rank + number * self.placement.rows_per_chunk

    def _finish(self, carry: Carry, finishes: Integer, number: Integer, microbatch: Integer) -> Carry:
        """Where batches overlap or weights come from the host, reduces a complete gradient and zeroes its sum."""
        sizes, rows = self.spec.sizes, self.placement.rows_per_chunk
        if not sizes.finished:
            return carry
        ordered = functools.partial(in_row_major, tile=self.model.tile)
        row = self._row(self._place(microbatch, sizes.sums), number, num_chunks=1)
        target = self._row(self._place(microbatch, sizes.finished), number, num_chunks=1)
        sums = stacks.flat(carry.grads.layers)

        def reduce_row(index: jax.Array, kept: tuple[Tree, jax.Array]) -> tuple[Tree, jax.Array]:
            finished, done = kept
            complete = ordered(jax.tree.map(lambda g: lax.dynamic_slice_in_dim(g, row + index, 1), sums))
            return stacks.with_rows(finished, ordered(self.between.reduce(complete)), target + index), done + 1

        def empty_row(index: jax.Array, sums: Tree) -> Tree:
            return stacks.with_rows(sums, jax.tree.map(lambda g: jnp.zeros_like(g[:1]), sums), row + index)

        # Rows are reduced one by one, so that memory never holds a second set of gradients. The second loop waits for
        # the first, since XLA:GPU copies an array that is written while it is read.
        todo = jnp.where(finishes == 1, rows, 0)
        finished, done = lax.fori_loop(0, todo, reduce_row, (stacks.flat(carry.finished), todo * 0))
        sums = lax.fori_loop(0, done, empty_row, sums)
        return with_layers(carry, sums)._replace(finished=stacks.like(finished, carry.finished))

    def _varying(self, x: Tree) -> Tree:
        return jax.tree.map(lambda leaf: lax.pcast(leaf, "pipe", to="varying"), x)

    def _unless_idle(self, chunk: Integer, x: jax.Array) -> jax.Array:
        return jnp.where(chunk == NONE, self._filled(x), x)

    def _filled(self, like: jax.Array) -> jax.Array:
        return jnp.full_like(like, self.fill)

    def _empty(self, like: jax.Array, *sizes: int) -> jax.Array:
        """An array [*sizes, …] of elements of the type of `like`."""
        element = self._filled(like) if jnp.issubdtype(like.dtype, jnp.inexact) else jnp.zeros_like(like)
        # For random keys, zeros_like does not preserve the mesh axes over which they vary.
        varying = [jax.typeof(x).manual_axis_type.varying for x in (like, element)]
        if axes := tuple(varying[0] - varying[1]):
            element = lax.pcast(element, axes, to="varying")
        return jnp.broadcast_to(element, (*sizes, *like.shape))


def _renamed(
    own: Tick, forward_hops: jax.Array, backward_hops: jax.Array, slots: Renames
) -> tuple[Tick, jax.Array, jax.Array]:
    """A row of the table in which each slot number is replaced by the actual slot."""
    # The memories are the same with either value of `scores_between`.
    memories = {name: access.memory for name, access in accesses(scores_between=False).items()}

    def place(column: str, slot: Any) -> Any:
        memory = getattr(slots, memories[column])
        return slot if memory is None else jnp.where(slot == NONE, NONE, memory[slot])

    renamed = {column: place(column, getattr(own, column)) for column in Tick._fields if column in memories}
    return own._replace(**renamed), place(FORWARD_HOPS, forward_hops), place(BACKWARD_HOPS, backward_hops)


def _if_any(microbatch: Integer, update: Callable[..., tuple[Any, ...]], *kept: Any) -> tuple[Any, ...]:
    """`update(microbatch, *kept)` if there is a microbatch, else `kept`.

    The number holds the work on the microbatch in the loop (`in_turn`). A collective stays there if its operand is
    among `kept` and `update` changes it.
    """
    num_turns = jnp.where(microbatch == NONE, 0, 1)
    return lax.fori_loop(0, num_turns, lambda turn, kept: update(in_turn(microbatch, turn), *kept), kept)
