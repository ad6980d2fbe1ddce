"""A pipeline that runs continuously from batch to batch, inside `shard_map`.

Each train step runs one window of a schedule (`fiddlex.schedules.windows`), which ends when the last gradient of the
step's batch exists, while microbatches of later batches are in flight. The ticks that a step runs are data: the same
program fills the pipeline, runs the windows that repeat, and drains it.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fiddlex.pipeline.carry import Carry, PipelineWeights, with_losses
from fiddlex.pipeline.engine import Engine
from fiddlex.schedules.windows import Renames

Tree = Any


class InFlight(NamedTuple):
    """What is in flight on a device between two steps."""

    carry: Carry
    slots: Renames  # for each memory, int32 [slot]: the actual slot for each number in the next table; None: no slots


class DeviceWindow(NamedTuple):
    """A window as the input of a program: arrays of numpy or of jax, the same on all devices."""

    table: Any  # int32 [tick, rank, column]; only the first `num_ticks` ticks run
    num_ticks: Any  # int32 scalar
    renames: Renames  # of slots after the window, each int32 [rank, slot]


def empty_pipeline(engine: Engine) -> InFlight:
    def in_order(size: int) -> jax.Array | None:
        # XLA crashes at an empty array among the inputs of a `shard_map` that uses it (jaxlib 0.11.2).
        return lax.pcast(jnp.arange(size, dtype=jnp.int32), "pipe", to="varying") if size else None

    return InFlight(_between_steps(engine, engine.start()), Renames(*map(in_order, engine.spec.sizes.slots)))


def run_window(
    engine: Engine, in_flight: InFlight, window: DeviceWindow
) -> tuple[InFlight, jax.Array, PipelineWeights]:
    """Runs the ticks of one step of `engine`, which has the versions, batches and number of the step.

    Returns:
      What is in flight after the step; the values of the step's own batch as from `execute`; and its gradients.
      `engine.between` has reduced those of the layers; those of embedding and head are this device's partial sums.
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
    (values, losses), later = _first(carry.values, carry.losses, number=spec.batch_size)
    carry = carry._replace(grads=carry.grads._replace(outer=emptied), values=later[0], losses=later[1])
    slots = [
        None if now is None else now[_row(rename, rank)]
        for now, rename in zip(in_flight.slots, window.renames, strict=True)
    ]
    return (
        InFlight(_between_steps(engine, carry), Renames(*slots)),
        with_losses(values, losses),
        PipelineWeights(outer, layers),
    )


def _between_steps(engine: Engine, carry: Carry) -> Carry:
    """The carry to pass to the next step: without `finished`, if each step starts with a new `finished`."""
    return carry._replace(finished=()) if engine.spec.sizes.finished == 1 else carry


def _first(*trees: Tree, number: int) -> tuple[tuple[Tree, ...], tuple[Tree, ...]]:
    """The first rows of arrays, and the others followed by as many zeros."""
    first = jax.tree.map(lambda x: x[:number], trees)
    return first, jax.tree.map(lambda x: jnp.concatenate([x[number:], jnp.zeros_like(x[:number])]), trees)


def _row(x: jax.Array, index: Any) -> jax.Array:
    return lax.dynamic_index_in_dim(x, index, keepdims=False)
