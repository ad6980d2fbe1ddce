"""Products of tensor parallelism beside which the exchange between the ranks runs: collective matmul.

Under sequence parallelism each rank has a part of the sequence. A column-parallel product needs the parts of all ranks,
and the results of a row-parallel product are summed over the ranks, each of which keeps its part. An all-gather before
the one and a reduce-scatter after the other would run while no product does. Here each product runs in pieces, one for
each part of the sequence, and the parts travel around the ring of the ranks: while one part travels, the rank
multiplies another (Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep
Learning Models", ASPLOS 2023, section 3).

In the backward pass, the gradient of the input of one of these products is the other product. A column-parallel product
saves only the rank's own part of its input, and gathers the parts once more for the gradient of its kernel (Korthikanti
et al., MLSys 2023, section 4.2.2).

Shape suffixes: B example, S whole sequence, T this rank's part of it, I inputs, O outputs; as in
`fiddlex.models.operators.product`, inputs and outputs may be several dimensions.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from fiddlex.cluster.rings import num_ways
from fiddlex.config import Config
from fiddlex.models.operators import Pair, input_gradient, kernel_gradient, multiplied, product
from fiddlex.parallel.collectives import SEQUENCE_DIMENSION

Arrays = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Rings:
    """How parts of the sequence travel between tensor ranks.

    Attributes:
      permutes: whether a hop is a permute, as on TPUs. On CPUs a permute waits for all devices of the mesh, also for
        those that take another branch of the schedule, and for GPUs nobody has tried; there a hop is an all-gather, of
        which the rank keeps one part.
    """

    permutes: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def gathered_products(x_BTI: jax.Array, kernels: Arrays, rings: Rings) -> Arrays:
    """The `product` of the whole sequence with each kernel, [B, S, O].

    Args:
      x_BTI: this rank's part of the sequence.
      kernels: this rank's columns of each kernel, [I, O].
      rings: how the parts travel.
    """
    return tuple(_gathered(x_BTI, [functools.partial(product, kernel=kernel) for kernel in kernels], rings))


def _gathered_forward(x_BTI: jax.Array, kernels: Arrays, rings: Rings) -> tuple[Arrays, tuple[jax.Array, Arrays]]:
    return gathered_products(x_BTI, kernels, rings), (x_BTI, kernels)


def _gathered_backward(rings: Rings, saved: tuple[jax.Array, Arrays], gs: Arrays) -> tuple[jax.Array, Arrays]:
    x_BTI, kernels = saved
    batch, length, *inputs = x_BTI.shape
    parts, whole = _Parts(x_BTI, rings), _Whole(length)

    def shares(step: int, places: list[_Positions]) -> list[jax.Array]:
        if step:
            parts.hop()
        for positions, part in zip(parts.positions(), parts.held, strict=True):
            whole.put(positions, part)
        sums = [_input_gradients(inputs, kernels, [place.of(g) for g in gs]) for place in places]
        # The next hop of x waits for these products, so that it runs beside those of the next step. Otherwise XLA may
        # run all of its hops first, beside nothing.
        sums, parts.held = lax.optimization_barrier((sums, parts.held))
        return sums

    dx_BTI = _scattered(shares, batch, length, x_BTI.dtype, rings)
    return dx_BTI, tuple(kernel_gradient(whole.value, kernel, g) for kernel, g in zip(kernels, gs, strict=True))


def _input_gradients(inputs: Sequence[int], kernels: Arrays, gs: Sequence[jax.Array]) -> jax.Array:
    """The gradient of the input that products share, in float32."""
    of_each = (input_gradient(inputs, kernel, g, jnp.float32) for kernel, g in zip(kernels, gs, strict=True))
    return functools.reduce(jnp.add, of_each)


gathered_products.defvjp(_gathered_forward, _gathered_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def scattered_product(x_BSI: jax.Array, kernel: jax.Array, rings: Rings) -> jax.Array:
    """This rank's part, [B, T, O], of the sum over the tensor ranks of their `product`.

    A sum travels in the compute dtype, and each rank adds its share to it in float32.

    Args:
      x_BSI: this rank's inputs, of the whole sequence.
      kernel: this rank's rows of the kernel, [I, O].
      rings: how the sums travel.
    """
    batch, length = x_BSI.shape[:2]

    def shares(step: int, places: list[_Positions]) -> list[jax.Array]:
        return [multiplied(place.of(x_BSI), kernel, jnp.float32) for place in places]

    return _scattered(shares, batch, length // lax.axis_size("tensor"), x_BSI.dtype, rings)


def _scattered_forward(x_BSI: jax.Array, kernel: jax.Array, rings: Rings) -> tuple[jax.Array, Pair]:
    return scattered_product(x_BSI, kernel, rings), (x_BSI, kernel)


def _scattered_backward(rings: Rings, saved: Pair, g_BTO: jax.Array) -> Pair:
    x_BSI, kernel = saved

    def gradient(part: jax.Array) -> jax.Array:
        return input_gradient(x_BSI.shape[2:], kernel, part, g_BTO.dtype)

    dx_BSI, g_BSO = _gathered(g_BTO, [gradient, lambda part: part], rings)
    return dx_BSI, kernel_gradient(x_BSI, kernel, g_BSO)


scattered_product.defvjp(_scattered_forward, _scattered_backward)


def make_rings(config: Config, mesh: Mesh) -> Rings | None:
    """The rings of a config on a mesh; None where the exchanges run before and after the products."""
    if not config.mesh.collective_matmul or config.mesh.tensor == 1:
        return None
    return Rings(permutes=mesh.devices.flat[0].platform == "tpu")


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
    """An array of the whole sequence, [B, S, …], written part by part.

    Args:
      length: positions of a rank's part of the sequence.
    """

    def __init__(self, length: int):
        self._length = length
        self._value: jax.Array | None = None

    @property
    def value(self) -> jax.Array:
        """The array, once all parts are written."""
        assert self._value is not None
        return self._value

    def put(self, positions: _Positions, part: jax.Array) -> None:
        """Writes the values at some positions."""
        if self._value is None:
            sizes = (part.shape[0], self._length * lax.axis_size("tensor"), *part.shape[2:])
            empty, axes = lax.empty(sizes, part.dtype), tuple(jax.typeof(part).manual_axis_type.varying)
            self._value = lax.pcast(empty, axes, to="varying")
        self._value = lax.dynamic_update_slice_in_dim(self._value, part, positions.first, axis=SEQUENCE_DIMENSION)


class _Parts:
    """The parts of the sequence that this rank holds while all parts travel around the ring.

    Args:
      x_BT: this rank's own part.
      rings: how the parts travel.

    Attributes:
      held: what travels each way; at first the halves of the rank's own part or, where parts travel one way, all of it.
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
        """The positions of what is held."""
        return [_positions(way, -self._hops, self._length) for way in self._ways]


def _gathered(x_BT: jax.Array, functions: Sequence[Callable[[jax.Array], jax.Array]], rings: Rings) -> list[jax.Array]:
    """The value of each function at the whole sequence, [B, S, …]; each maps every position by itself."""
    parts, wholes = _Parts(x_BT, rings), [_Whole(x_BT.shape[1]) for _ in functions]
    for step in range(lax.axis_size("tensor")):
        if step:
            parts.hop()
        for positions, part in zip(parts.positions(), parts.held, strict=True):
            for whole, function in zip(wholes, functions, strict=True):
                whole.put(positions, function(part))
    return [whole.value for whole in wholes]


def _scattered(
    shares: Callable[[int, list[_Positions]], list[jax.Array]], batch: int, length: int, dtype: jnp.dtype, rings: Rings
) -> jax.Array:
    """This rank's part of the sum over the ranks of their shares, [B, T, …] in `dtype`.

    Args:
      shares: takes the number of a step, from 0, and positions for each way; gives this rank's shares of the sums at
        these positions, float32 [B, positions, …].
      batch: B.
      length: T.
      dtype: the dtype in which the sums travel.
      rings: how they travel.
    """
    num_parts, ways = lax.axis_size("tensor"), _ways(batch, length)
    sums: list[jax.Array] = []
    for step in range(num_parts):
        totals = shares(step, [_positions(way, num_parts - 1 - step, length) for way in ways])
        if sums:
            arrived = [_hop(total, way.shift, rings) for total, way in zip(sums, ways, strict=True)]
            totals = [mine + total.astype(jnp.float32) for mine, total in zip(totals, arrived, strict=True)]
        sums = [total.astype(dtype) for total in totals]
    return jnp.concatenate(sums, axis=SEQUENCE_DIMENSION)


def _ways(batch: int, length: int) -> list[_Way]:
    """The directions in which the parts travel: all positions of a part in one, or half of them in each of two."""
    size = length // num_ways(batch, length, lax.axis_size("tensor"))
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
    return lax.all_gather(x, "tensor")[(lax.axis_index("tensor") - shift) % size]
