"""A pipeline that runs on from batch to batch, inside `shard_map`.

Each train step runs one window of a schedule (`fiddlex.schedules.windows`): the window ends when the last gradient of
the step's batch exists, with microbatches of later batches still under way. What they need stays on each device as an
`InFlight`. Which ticks a step runs is data: one program runs the windows that fill the pipeline, those that repeat, and
those that drain it.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fiddlex.pipeline.engine import Carry, Engine, Weights
from fiddlex.schedules.windows import Renames

Tree = Any


class InFlight(NamedTuple):
    """What is in flight on a device between two steps."""

    carry: Carry
    slots: Renames  # where each slot that the next table names lies, for each memory int32 [slot]


class DeviceWindow(NamedTuple):
    """A window as a program takes it; arrays of numpy or of jax, the same on all devices.

    Attributes:
      table: int32 [tick, rank, column], of which the first `num_ticks` ticks are run.
      num_ticks: int32 scalar.
      renames: of slots after the window, each int32 [rank, slot].
    """

    table: Any
    num_ticks: Any
    renames: Renames


def empty_pipeline(engine: Engine) -> InFlight:
    """What a pipeline begins with in which nothing is in flight."""
    slots = [lax.pcast(jnp.arange(size, dtype=jnp.int32), "pipe", to="varying") for size in engine.spec.sizes.slots]
    return InFlight(_between_steps(engine, engine.start()), Renames(*slots))


def run_window(engine: Engine, in_flight: InFlight, window: DeviceWindow) -> tuple[InFlight, jax.Array, Weights]:
    """Runs the ticks of one step.

    Args:
      engine: with the versions, batches and number of the step.
      in_flight: what was in flight after the step before.
      window: the ticks.

    Returns:
      What is in flight now, and of the step's own batch the values of the head, [microbatch, …], and the gradients:
      those of the layers reduced by `engine.reduce`, those of embedding and head as they are on this device.
    """
    spec, rank = engine.spec, lax.axis_index("pipe")
    engine = dataclasses.replace(engine, slots=in_flight.slots)
    carry = in_flight.carry
    if spec.sizes.finished == 1:
        carry = carry._replace(finished=engine.start().finished)

    def body(tick: jax.Array, carry: Carry) -> Carry:
        rows = lax.dynamic_index_in_dim(window.table, tick, keepdims=False)
        return engine.tick(carry, rows[0], _row(rows, rank))

    with jax.named_scope("ticks"):
        carry = lax.fori_loop(0, window.num_ticks, body, carry)
    sums, finished = engine.step % spec.sizes.outer_sums, engine.step % spec.sizes.finished
    outer = jax.tree.map(lambda g: _row(g, sums), carry.grads.outer)
    layers = jax.tree.map(lambda g: _row(g, finished), carry.finished)
    emptied = jax.tree.map(
        lambda total, g: lax.dynamic_update_index_in_dim(total, jnp.zeros_like(g), sums, 0), carry.grads.outer, outer
    )
    values, later = jnp.split(carry.values, [spec.batch_size])
    carry = carry._replace(
        grads=carry.grads._replace(outer=emptied), values=jnp.concatenate([later, jnp.zeros_like(values)])
    )
    slots = [
        now[_row(rename, rank)] if len(now) else now
        for now, rename in zip(in_flight.slots, window.renames, strict=True)
    ]
    return InFlight(_between_steps(engine, carry), Renames(*slots)), values, Weights(outer, layers)


def _between_steps(engine: Engine, carry: Carry) -> Carry:
    """A carry without what the next step starts anew."""
    return carry._replace(finished=()) if engine.spec.sizes.finished == 1 else carry


def _row(x: jax.Array, index: Any) -> jax.Array:
    return lax.dynamic_index_in_dim(x, index, keepdims=False)
