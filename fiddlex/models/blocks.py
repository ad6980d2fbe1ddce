"""Collective matmul in blocks: each rank's part of the sequence is cut into blocks, which are exchanged one by one.

While the ranks gather one block of all parts they multiply the block before it, and while they sum the results of one
block they multiply the next. XLA would combine these collectives into one, and the products with the same kernel into
one, whenever it may run them together: hence the barriers, by which each collective and each product waits for the one
before it.

Shape suffixes: R tensor rank, B example, K block, C position in a block, S whole sequence (R · K · C positions), T this
rank's part of it (K · C positions). A piece has R · B examples.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from fiddlex.hardware.pieces import num_blocks
from fiddlex.models.exchange import Share
from fiddlex.parallel.collectives import SEQUENCE_DIMENSION


@dataclasses.dataclass(frozen=True)
class Blocks:
    """An `Exchange` by all-gathers and reduce-scatters of blocks, as XLA runs them beside products on GPUs."""

    def gather(self, x_BT: jax.Array, functions: Sequence[Callable[[jax.Array], jax.Array]]) -> list[jax.Array]:
        """Functions are called for one block of all ranks at a time."""
        batch, length = x_BT.shape[:2]
        first, *others = jnp.split(x_BT, num_blocks(batch, length, lax.axis_size("tensor")), axis=SEQUENCE_DIMENSION)
        piece, values = _gathered(first), []
        for block in others:
            piece, block = lax.optimization_barrier((piece, block))
            following = _gathered(block)
            value, piece = lax.optimization_barrier(([function(piece) for function in functions], following))
            values.append(value)
        values.append([function(piece) for function in functions])
        return [_whole(pieces, batch) for pieces in zip(*values, strict=True)]

    def scatter(self, share: Share, batch: int, length: int, dtype: jnp.dtype) -> jax.Array:
        """The ranks sum in `dtype`."""
        number = num_blocks(batch, length, lax.axis_size("tensor"))
        take, sums = _Take(number), list[jax.Array]()
        for index in range(number):
            value = share(functools.partial(take, index), dtype)
            if take.before is not None:
                sums = _with_sum(sums, take.before, batch)
            take.before = value
        return jnp.concatenate(_with_sum(sums, value, batch), axis=SEQUENCE_DIMENSION)

    def gather_and_scatter(self, x_BT: jax.Array, share: Share) -> tuple[jax.Array, jax.Array]:
        """One all-gather brings all of the sequence while the products of `share` run."""
        x_BS = lax.all_gather(x_BT, "tensor", axis=SEQUENCE_DIMENSION, tiled=True)
        return x_BS, self.scatter(share, x_BT.shape[0], x_BT.shape[1], x_BT.dtype)


def _gathered(block_BC: jax.Array) -> jax.Array:
    """The piece with this block of all ranks."""
    block_RBC = lax.all_gather(block_BC, "tensor")
    return block_RBC.reshape(-1, *block_BC.shape[1:])


def _with_sum(sums: list[jax.Array], piece: jax.Array, batch: int) -> list[jax.Array]:
    """`sums` and this rank's block, [B, C, …], of the sum of a piece over the ranks."""
    if sums:
        piece, last = lax.optimization_barrier((piece, sums[-1]))
        sums = [*sums[:-1], last]
    piece_RBC = piece.reshape(-1, batch, *piece.shape[1:])
    return [*sums, lax.psum_scatter(piece_RBC, "tensor", scatter_dimension=0)]


class _Take:
    """Takes the piece of one of `number` blocks of [B, S, …], which waits for `before`, the value of the last piece."""

    def __init__(self, number: int):
        self._number = number
        self.before: jax.Array | None = None

    def __call__(self, index: int, x_BS: jax.Array) -> jax.Array:
        batch, *rest = x_BS.shape[0], *x_BS.shape[2:]
        x_BRKC = x_BS.reshape(batch, lax.axis_size("tensor"), self._number, -1, *rest)
        piece = jnp.moveaxis(x_BRKC[:, :, index], 1, 0).reshape(-1, x_BRKC.shape[3], *rest)
        if self.before is not None:
            piece, self.before = lax.optimization_barrier((piece, self.before))
        return piece


def _whole(pieces: Sequence[jax.Array], batch: int) -> jax.Array:
    """The whole sequence, [B, S, …], of the pieces of all blocks."""
    positions, *rest = pieces[0].shape[1:]
    x_KRBC = jnp.stack(pieces).reshape(len(pieces), -1, batch, positions, *rest)
    return jnp.moveaxis(x_KRBC, (2, 1, 0), (0, 1, 2)).reshape(batch, -1, *rest)
