"""What collective matmul asks of an exchange between the tensor ranks (`fiddlex.models.collective_matmul`).

Shape suffixes: B example, S whole sequence, T this rank's part of it. A piece of a sequence is [example, position, …],
like a whole one; examples of several ranks may stand one after the other in it.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp

Take = Callable[[jax.Array], jax.Array]  # takes the positions of a piece from [B, S, …]
Share = Callable[[Take, jnp.dtype], jax.Array]  # this rank's share of the sums at a piece, [example, position, …]


class Exchange(Protocol):
    """How the ranks exchange the pieces of a sequence while they multiply other pieces."""

    def gather(self, x_BT: jax.Array, functions: Sequence[Callable[[jax.Array], jax.Array]]) -> list[jax.Array]:
        """The value of each function of a piece at the whole sequence, [B, S, …]; it maps every position by itself."""
        ...

    def scatter(self, share: Share, batch: int, length: int, dtype: jnp.dtype) -> jax.Array:
        """This rank's part of the sum over the ranks of their shares, [B, T, …] in `dtype`, in which sums travel.

        `share` gives this rank's shares at a piece in the dtype that the exchange wants; `batch` is B, `length` T.
        """
        ...

    def gather_and_scatter(self, x_BT: jax.Array, share: Share) -> tuple[jax.Array, jax.Array]:
        """The whole sequence of `x_BT`, [B, S, …], and what `scatter` gives for sums of the shape of `x_BT`."""
        ...
