"""Products of tensor parallelism beside which the exchange between the ranks runs: collective matmul.

Under sequence parallelism each rank has a part of the sequence. A column-parallel product needs the parts of all ranks,
and the results of a row-parallel product are summed over the ranks, each of which keeps its part. An all-gather before
the one and a reduce-scatter after the other would run while no product does. Here each product runs in pieces: while
one piece is exchanged, the rank multiplies another (Wang et al., "Overlap Communication with Dependent Computation via
Decomposition in Large Deep Learning Models", ASPLOS 2023, section 3). The pieces are parts that travel around a ring
(`fiddlex.models.rings`) or blocks of all parts (`fiddlex.models.blocks`).

In the backward pass, the gradient of the input of one of these products is the other product. A column-parallel product
saves only the rank's own part of its input, and gathers the parts once more for the gradient of its kernel (Korthikanti
et al., MLSys 2023, section 4.2.2).

Shape suffixes: B example, S whole sequence, T this rank's part of it, I inputs, O outputs; as in
`fiddlex.models.operators.product`, inputs and outputs may be several dimensions.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from fiddlex.cluster.pieces import runs_in_blocks
from fiddlex.config import Config
from fiddlex.models.blocks import Blocks
from fiddlex.models.exchange import Exchange, Take
from fiddlex.models.operators import Pair, input_gradient, kernel_gradient, multiplied, product
from fiddlex.models.rings import Rings

Arrays = tuple[jax.Array, ...]


def make_exchange(config: Config, mesh: Mesh) -> Exchange | None:
    """The exchange of a config on a mesh; None where the exchanges run before and after the products."""
    if not config.mesh.collective_matmul or config.mesh.tensor == 1:
        return None
    platform = mesh.devices.flat[0].platform
    return Blocks() if runs_in_blocks(platform) else Rings(permutes=platform == "tpu")


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def gathered_products(x_BTI: jax.Array, kernels: Arrays, exchange: Exchange) -> Arrays:
    """The `product` of the whole sequence with each kernel, [B, S, O].

    Args:
      x_BTI: this rank's part of the sequence.
      kernels: this rank's columns of each kernel, [I, O].
      exchange: how the ranks exchange their parts.
    """
    return tuple(exchange.gather(x_BTI, [functools.partial(product, kernel=kernel) for kernel in kernels]))


def _gathered_forward(x_BTI: jax.Array, kernels: Arrays, exchange: Exchange) -> tuple[Arrays, tuple[jax.Array, Arrays]]:
    return gathered_products(x_BTI, kernels, exchange), (x_BTI, kernels)


def _gathered_backward(exchange: Exchange, saved: tuple[jax.Array, Arrays], gs: Arrays) -> tuple[jax.Array, Arrays]:
    x_BTI, kernels = saved

    def share(take: Take, dtype: jnp.dtype) -> jax.Array:
        return _input_gradients(x_BTI.shape[2:], kernels, [take(g) for g in gs], dtype)

    x_BSI, dx_BTI = exchange.gather_and_scatter(x_BTI, share)
    return dx_BTI, tuple(kernel_gradient(x_BSI, kernel, g) for kernel, g in zip(kernels, gs, strict=True))


def _input_gradients(inputs: Sequence[int], kernels: Arrays, gs: Sequence[jax.Array], dtype: jnp.dtype) -> jax.Array:
    """The gradient of the input that products share, with sums in `dtype`."""
    of_each = (input_gradient(inputs, kernel, g, dtype) for kernel, g in zip(kernels, gs, strict=True))
    return functools.reduce(jnp.add, of_each)


gathered_products.defvjp(_gathered_forward, _gathered_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def scattered_product(x_BSI: jax.Array, kernel: jax.Array, exchange: Exchange) -> jax.Array:
    """This rank's part, [B, T, O], of the sum over the tensor ranks of their `product`.

    Args:
      x_BSI: this rank's inputs, of the whole sequence.
      kernel: this rank's rows of the kernel, [I, O].
      exchange: how the ranks exchange and sum their results.
    """
    batch, length = x_BSI.shape[0], x_BSI.shape[1] // lax.axis_size("tensor")

    def share(take: Take, dtype: jnp.dtype) -> jax.Array:
        return multiplied(take(x_BSI), kernel, dtype)

    return exchange.scatter(share, batch, length, x_BSI.dtype)


def _scattered_forward(x_BSI: jax.Array, kernel: jax.Array, exchange: Exchange) -> tuple[jax.Array, Pair]:
    return scattered_product(x_BSI, kernel, exchange), (x_BSI, kernel)


def _scattered_backward(exchange: Exchange, saved: Pair, g_BTO: jax.Array) -> Pair:
    x_BSI, kernel = saved

    def gradient(piece: jax.Array) -> jax.Array:
        return input_gradient(x_BSI.shape[2:], kernel, piece, g_BTO.dtype)

    dx_BSI, g_BSO = exchange.gather(g_BTO, [gradient, lambda piece: piece])
    return dx_BSI, kernel_gradient(x_BSI, kernel, g_BSO)


scattered_product.defvjp(_scattered_forward, _scattered_backward)
