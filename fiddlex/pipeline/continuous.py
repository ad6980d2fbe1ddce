"""A pipeline that goes on from call to call, inside `shard_map`.

A call runs one window of a schedule (`windows`): it ends when the last gradient of its batch exists, with microbatches
of later batches still under way. What they need stays on each device as a `Flight`. Which ticks a call runs is data:
windows that fill the pipeline, repeat or drain it are run by one program.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fiddlex.pipeline.engine import Carry, Engine, Weights
from fiddlex.schedules.windows import Renames

Tree = Any


class Flight(NamedTuple):
    """What is in flight between two calls, on a device."""

    carry: Carry
    slots: Renames  # where each slot that the next table names lies, for each memory int32 [slot]


class Call(NamedTuple):
    """What changes from call to call; arrays of numpy or of jax, the same on all devices.

    Attributes:
      table: int32 [tick, rank, column], of which `num_ticks` are run.
      num_ticks: int32 scalar.
      renames: of slots after the call, each int32 [rank, slot].
    """

    table: Any
    num_ticks: Any
    renames: Renames


def depart(engine: Engine) -> Flight:
    """An empty pipeline."""
    slots = [lax.pcast(jnp.arange(size, dtype=jnp.int32), "pipe", to="varying") for size in engine.frame.sizes.slots]
    return Flight(_between_calls(engine, engine.start()), Renames(*slots))


def advance(engine: Engine, flight: Flight, call: Call) -> tuple[Flight, jax.Array, Weights]:
    """Runs a window.

    Args:
      engine: with the versions, batches and number of the call.
      flight: what was in flight after the call before.
      call: the window.

    Returns:
      What is in flight now, and of the call's own batch the values of the head, [microbatch, …], and the gradients:
      those of the layers reduced by `engine.reduce`, those of embedding and head as they are on this device.
    """
    frame, rank = engine.frame, lax.axis_index("pipe")
    engine = dataclasses.replace(engine, slots=flight.slots)
    carry = flight.carry
    if frame.sizes.finished == 1:
        carry = carry._replace(finished=engine.start().finished)

    def body(tick: jax.Array, carry: Carry) -> Carry:
        rows = lax.dynamic_index_in_dim(call.table, tick, keepdims=False)
        return engine.tick(carry, rows[0], _row(rows, rank))

    with jax.named_scope("ticks"):
        carry = lax.fori_loop(0, call.num_ticks, body, carry)
    sums, finished = engine.step % frame.sizes.outer_sums, engine.step % frame.sizes.finished
    outer = jax.tree.map(lambda g: _row(g, sums), carry.grads.outer)
    layers = jax.tree.map(lambda g: _row(g, finished), carry.finished)
    emptied = jax.tree.map(
        lambda total, g: lax.dynamic_update_index_in_dim(total, jnp.zeros_like(g), sums, 0), carry.grads.outer, outer
    )
    values, later = jnp.split(carry.values, [frame.batch_size])
    carry = carry._replace(
        grads=carry.grads._replace(outer=emptied), values=jnp.concatenate([later, jnp.zeros_like(values)])
    )
    slots = [
        now[_row(rename, rank)] if len(now) else now for now, rename in zip(flight.slots, call.renames, strict=True)
    ]
    return Flight(_between_calls(engine, carry), Renames(*slots)), values, Weights(outer, layers)


def _between_calls(engine: Engine, carry: Carry) -> Carry:
    """A carry without what the next call starts anew."""
    return carry._replace(finished=()) if engine.frame.sizes.finished == 1 else carry


def _row(x: jax.Array, index: Any) -> jax.Array:
    return lax.dynamic_index_in_dim(x, index, keepdims=False)
