"""Products of tensor parallelism beside which the exchange between the ranks runs: collective matmul.

Under sequence parallelism, an all-gather before a column-parallel product and a reduce-scatter after a row-parallel one
would run while no product does. Here each product runs in pieces: while one piece is exchanged, the rank multiplies
another (Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning
Models", ASPLOS 2023, section 3). The pieces are parts that travel around a ring (`fiddlex.models.rings`) or blocks of
all parts (`fiddlex.models.blocks`).

In the backward pass, the gradient of the input of one of these products is the other product. A column-parallel product
saves only the rank's own part of its input, and gathers the parts once more for the gradient of its kernel (Korthikanti
et al., MLSys 2023, section 4.2.2).

Shape suffixes: B example, S whole sequence, T this rank's part of it, I inputs, O outputs; as in
`fiddlex.models.operators.multiplied`, inputs and outputs may be several dimensions.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from fiddlex.config import Config
from fiddlex.hardware.pieces import runs_in_blocks
from fiddlex.models.blocks import Blocks
from fiddlex.models.exchange import Exchange, Take
from fiddlex.models.operators import input_gradient, kernel_gradient, multiplied
from fiddlex.models.products import Arrays, flat, input_gradients
from fiddlex.models.rings import Rings


def make_exchange(config: Config, mesh: Mesh) -> Exchange | None:
    """The exchange of a config on a mesh; None where the exchanges run before and after the products."""
    if not config.mesh.collective_matmul or config.mesh.tensor == 1:
        return None
    platform = mesh.devices.flat[0].platform
    return Blocks() if runs_in_blocks(platform) else Rings(permutes=platform == "tpu")


# Two NamedTuples of one exchange would be equal, and a cache of jax would take one rule for the other.
@dataclasses.dataclass(frozen=True)
class Gathered:
    """A `Rule` of products of the whole sequence whose input is this rank's part of it, [B, T, I]."""

    exchange: Exchange

    def forward(self, x: jax.Array, kernels: Arrays) -> Arrays:
        """The kernels are this rank's columns, the products [B, S, O]."""
        return tuple(self.exchange.gather(x, [functools.partial(_product, kernel=kernel) for kernel in kernels]))

    def backward(self, x: jax.Array, kernels: Arrays, gs: Arrays) -> tuple[jax.Array, Arrays]:
        gs = flat(gs)

        def share(take: Take, dtype: jnp.dtype) -> jax.Array:
            return input_gradients(x.shape[2:], kernels, [take(g) for g in gs], dtype)

        x_BSI, dx = self.exchange.gather_and_scatter(x, share)
        return dx, tuple(kernel_gradient(x_BSI, kernel, g) for kernel, g in zip(kernels, gs, strict=True))


@dataclasses.dataclass(frozen=True)
class Scattered:
    """A `Rule` of one product, of which each rank keeps its part, [B, T, O], of the sum over the ranks."""

    exchange: Exchange

    def forward(self, x: jax.Array, kernels: Arrays) -> Arrays:
        """`x` is [B, S, I], and the kernel has this rank's rows."""
        (kernel,), batch, length = kernels, x.shape[0], x.shape[1] // lax.axis_size("tensor")

        def share(take: Take, dtype: jnp.dtype) -> jax.Array:
            return multiplied(take(x), kernel, dtype)

        return (self.exchange.scatter(share, batch, length, x.dtype),)

    def backward(self, x: jax.Array, kernels: Arrays, gs: Arrays) -> tuple[jax.Array, Arrays]:
        (kernel,), (g_BTO,) = kernels, gs

        def gradient(piece: jax.Array) -> jax.Array:
            return input_gradient(x.shape[2:], kernel, piece, g_BTO.dtype)

        dx, g_BSO = self.exchange.gather(g_BTO, [gradient, lambda piece: piece])
        return dx, (kernel_gradient(x, kernel, g_BSO),)


def _product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return multiplied(x, kernel, x.dtype)
