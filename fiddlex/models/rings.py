"""Collective matmul in rings: the parts of the sequence travel around the ring of the tensor ranks.

While one part travels from rank to rank, each rank multiplies another, so that a product runs in as many pieces as
there are ranks, or in twice as many where half of each part travels in each direction (Wang et al., ASPLOS 2023,
section 3).

Shape suffixes: B example, S whole sequence, T this rank's part of it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fiddlex.hardware.pieces import num_ways
from fiddlex.models.exchange import Share, Take
from fiddlex.parallel.collectives import SEQUENCE_DIMENSION


@dataclasses.dataclass(frozen=True)
class Rings:
    """An `Exchange` by hops between neighbours; a sum travels in the compute dtype, and ranks add to it in float32."""

    permutes: bool  # whether a hop is a permute, as on TPUs, or an all-gather of which the rank keeps one part

    def gather(self, x_BT: jax.Array, functions: Sequence[Callable[[jax.Array], jax.Array]]) -> list[jax.Array]:
        """Functions are called for one part, or half of it, at a time."""
        parts, wholes = _Parts(x_BT, self), [_Whole(x_BT.shape[1]) for _ in functions]
        for step in range(lax.axis_size("tensor")):
            if step:
                parts.hop()
            for positions, part in zip(parts.positions(), parts.held, strict=True):
                for whole, function in zip(wholes, functions, strict=True):
                    whole.put(positions, function(part))
        return [whole.value for whole in wholes]

    def scatter(self, share: Share, batch: int, length: int, dtype: jnp.dtype) -> jax.Array:
        return self._scatter(lambda step, takes: [share(take, jnp.float32) for take in takes], batch, length, dtype)

    def gather_and_scatter(self, x_BT: jax.Array, share: Share) -> tuple[jax.Array, jax.Array]:
        """The parts of the sequence travel beside the sums, on the same links."""
        parts, whole = _Parts(x_BT, self), _Whole(x_BT.shape[1])

        def shares(step: int, takes: list[Take]) -> list[jax.Array]:
            if step:
                parts.hop()
            for positions, part in zip(parts.positions(), parts.held, strict=True):
                whole.put(positions, part)
            sums = [share(take, jnp.float32) for take in takes]
            # The next hop of x waits for these products, so that it runs beside those of the next step. Otherwise XLA
            # may run all of its hops first, beside nothing.
            sums, parts.held = lax.optimization_barrier((sums, parts.held))
            return sums

        dx_BT = self._scatter(shares, x_BT.shape[0], x_BT.shape[1], x_BT.dtype)
        return whole.value, dx_BT

    def _scatter(
        self, shares: Callable[[int, list[Take]], list[jax.Array]], batch: int, length: int, dtype: jnp.dtype
    ) -> jax.Array:
        """`scatter` with `shares`, which takes the number of a step, from 0, and a `Take` for each way.

        It gives this rank's shares, float32 [B, position, …], of the sums that travel each way in this step.
        """
        num_parts, ways = lax.axis_size("tensor"), _ways(batch, length)
        sums: list[jax.Array] = []
        for step in range(num_parts):
            totals = shares(step, [_positions(way, num_parts - 1 - step, length).of for way in ways])
            if sums:
                arrived = [_hop(total, way.shift, self) for total, way in zip(sums, ways, strict=True)]
                totals = [mine + total.astype(jnp.float32) for mine, total in zip(totals, arrived, strict=True)]
            sums = [total.astype(dtype) for total in totals]
        return jnp.concatenate(sums, axis=SEQUENCE_DIMENSION)


class _Way(NamedTuple):
    """The positions of each part, `size` of them from `start` on, that travel in the direction `shift`, 1 or -1."""

    shift: int
    start: int
    size: int


class _Positions(NamedTuple):
    """Contiguous positions of the whole sequence; the first is an int32 scalar."""

    first: jax.Array
    size: int

    def of(self, x_BS: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(x_BS, self.first, self.size, axis=SEQUENCE_DIMENSION)


class _Whole:
    """An array of the whole sequence, [B, S, …], written part by part; `length` is that of a rank's part."""

    def __init__(self, length: int):
        self._length = length
        self._value: jax.Array | None = None

    @property
    def value(self) -> jax.Array:
        """Available once all parts are written."""
        assert self._value is not None
        return self._value

    def put(self, positions: _Positions, part: jax.Array) -> None:
        if self._value is None:
            sizes = (part.shape[0], self._length * lax.axis_size("tensor"), *part.shape[2:])
            empty, axes = lax.empty(sizes, part.dtype), tuple(jax.typeof(part).manual_axis_type.varying)
            self._value = lax.pcast(empty, axes, to="varying")
        self._value = lax.dynamic_update_slice_in_dim(self._value, part, positions.first, axis=SEQUENCE_DIMENSION)


class _Parts:
    """The parts of the sequence that this rank holds while all parts travel around the ring.

    `held` is what travels each way; at first the halves of `x_BT`, the rank's own part, or all of it if there is one
    way.
    """

    def __init__(self, x_BT: jax.Array, rings: Rings):
        self._rings, self._length, self._hops = rings, x_BT.shape[1], 0
        self._ways = _ways(*x_BT.shape[:2])
        self.held = [
            lax.slice_in_dim(x_BT, way.start, way.start + way.size, axis=SEQUENCE_DIMENSION) for way in self._ways
        ]

    def hop(self) -> None:
        """Sends what is held to the next rank each way, and receives what is held from then on."""
        self.held = [_hop(part, way.shift, self._rings) for part, way in zip(self.held, self._ways, strict=True)]
        self._hops += 1

    def positions(self) -> list[_Positions]:
        return [_positions(way, -self._hops, self._length) for way in self._ways]


def _ways(batch: int, length: int) -> list[_Way]:
    """The directions in which the parts travel: all positions of a part in one, or half of them in each of two."""
    size = length // num_ways(batch, length)
    return [_Way(shift, start, size) for shift, start in zip((1, -1), range(0, length, size), strict=False)]


def _positions(way: _Way, hops: int, length: int) -> _Positions:
    """The positions, of the part of the rank that is `hops` hops on from here, that travel this way."""
    rank = (lax.axis_index("tensor") + way.shift * hops) % lax.axis_size("tensor")
    return _Positions(rank * length + way.start, way.size)


def _hop(x: jax.Array, shift: int, rings: Rings) -> jax.Array:
    """What arrives here when each tensor rank sends `x` to the rank `shift` ranks on."""
    size = lax.axis_size("tensor")
    if rings.permutes:
        return lax.ppermute(x, "tensor", [(rank, (rank + shift) % size) for rank in range(size)])
    # On CPUs a permute waits for all devices of the mesh, also for those that are idle in this slot.
    return lax.all_gather(x, "tensor")[(lax.axis_index("tensor") - shift) % size]
