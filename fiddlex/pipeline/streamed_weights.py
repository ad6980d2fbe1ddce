"""Runs a lowered schedule while weights of layers come from the host and their gradients go there, inside `shard_map`.

`fiddlex.schedules.weight_stream` says which rows travel in which period of ticks: they leave one memory at its start
and are in the other at its end. Every period copies rows both ways, needed or not, since XLA copies whole arrays of the
host that pass through a conditional. The loop over periods only reads the weights of the host and only writes the
gradients: XLA:GPU copies an array of the host that a loop both reads and writes.

XLA decides when the copies begin. An optimization barrier after the ticks, and a loop that writes what has arrived,
leave XLA:TPU no work but the ticks beside them.

Matrices alone wait on the host. Vectors, such as the scales of norms, wait on the device and pass through the same
buffers: XLA:TPU cannot copy rows of an array with two dimensions to the host or back.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fiddlex.parallel.host_memory import is_on_host, put_like
from fiddlex.pipeline import host_stash, stacks
from fiddlex.pipeline.carry import Carry, PipelineWeights
from fiddlex.pipeline.engine import Engine
from fiddlex.pipeline.stage import Integer, in_turn
from fiddlex.schedules.table import NONE
from fiddlex.schedules.weight_stream import WeightStream

Tree = Any


class _Streamed(NamedTuple):
    """What passes from period to period."""

    carry: Carry
    weights: Tree  # of two chunks, [row of two chunks, …]
    gradients: Tree  # reduced, of all layers, [row, …]; empty without backward passes


def run_periods(engine: Engine, host: Tree, stream: WeightStream, table: np.ndarray) -> tuple[Carry, Tree]:
    """Runs a table from an empty pipeline to its end.

    Args:
      engine: the layers' weights in its `versions` are ignored.
      host: the weights of all layers, [row, …]; matrices are on the host.
      stream: when they come, and when gradients go.
      table: int32 [tick, rank, column], with whole periods (`Lowered.with_idle`).

    Returns:
      The state after the last tick, and the reduced gradients of all layers, [row, …], in the same memories.
    """
    rows_per_chunk, rank = engine.placement.rows_per_chunk, lax.axis_index("pipe")
    chunk = _rows(engine, host, 0, rows_per_chunk)
    weights = jax.tree.map(lambda w: jnp.concatenate([w, w]), chunk)
    carry = _with(engine, weights).start()
    gradients = _none_yet(host, carry, engine.placement.rows_per_rank) if engine.spec.trains else ()

    def period(index: Integer, streamed: _Streamed) -> _Streamed:
        load, store, shared, own = (lax.dynamic_index_in_dim(each, index, keepdims=False) for each in rows)
        carry, weights, gradients = streamed
        arriving = _rows(engine, host, load, stream.rows)
        if engine.spec.trains:
            gradients = _stored(gradients, carry, store, stream.rows)
        present = _with(engine, weights)
        carry, _ = lax.scan(lambda carry, tick: (present.tick(carry, *tick), None), carry, (shared, own))
        carry, arriving = host_stash.together((carry, arriving))
        weights = _with_rows(weights, arriving, load)
        return _Streamed(carry, weights, gradients)

    def of_rank(each: np.ndarray) -> jax.Array:
        return lax.dynamic_index_in_dim(jnp.asarray(each), rank, axis=1, keepdims=False)

    shape = (len(stream.loads), stream.period, table.shape[-1])
    ticks = (jnp.asarray(table[:, 0]).reshape(shape), of_rank(table).reshape(shape))
    rows = (of_rank(stream.loads), of_rank(stream.early_stores), *ticks)
    # XLA:TPU would compile the last period a second time, outside the loop, if it knew their number.
    number = lax.optimization_barrier(jnp.int32(len(stream.loads)))
    with jax.named_scope("periods"):
        carry, _, gradients = lax.fori_loop(0, number, period, _Streamed(carry, weights, gradients))
    if engine.spec.trains:
        gradients = _stored(gradients, carry, 0, rows_per_chunk)
    return carry, gradients


def _with(engine: Engine, weights: Tree) -> Engine:
    """The engine with the weights of two chunks."""
    layers = jax.tree.map(lambda w: w[None], weights)
    return dataclasses.replace(engine, versions=PipelineWeights(engine.versions.outer, layers))


@jax.named_scope("load")
def _rows(engine: Engine, host: Tree, row: Integer, number: int) -> Tree:
    """Rows of arrays on the device, `number` from `row` on."""
    first = jnp.maximum(row, 0)
    return engine.between.fetch(jax.tree.map(lambda array: lax.dynamic_slice_in_dim(array, first, number), host))


@jax.named_scope("load")
def _with_rows(weights: Tree, rows: Tree, first: Integer) -> Tree:
    """The weights of two chunks with `rows` at the place of row `first`, if that is not NONE."""

    def put(turn: jax.Array, weights: Tree) -> Tree:
        number = len(jax.tree.leaves(weights)[0])
        return stacks.with_rows(weights, rows, in_turn(first, turn) % number)

    return lax.fori_loop(0, jnp.where(first == NONE, 0, 1), put, weights)


def _none_yet(host: Tree, carry: Carry, number: int) -> Tree:
    """Arrays for the gradients of all layers, [row, …], each in the memory in which the weight is."""

    def room(weight: jax.Array, finished: jax.Array) -> jax.Array:
        row = finished[0, 0]
        return host_stash.empty(row, number) if is_on_host(weight) else stacks.zeros(row, number)

    return jax.tree.map(room, host, carry.finished)


@jax.named_scope("store")
def _stored(host: Tree, carry: Carry, row: Integer, number: int) -> Tree:
    """Gradients of all layers with `number` rows of the complete gradient of a chunk, from `row` on."""

    def put(array: jax.Array, finished: jax.Array) -> jax.Array:
        values = lax.dynamic_slice_in_dim(finished[0], row % finished.shape[1], number)
        return lax.dynamic_update_slice_in_dim(array, put_like(values, array), row, 0)

    return jax.tree.map(put, host, carry.finished)
