"""The settings that every layer of one microbatch receives in addition to its input."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from fiddlex.models.cache import LayerCache
from fiddlex.models.dropout import Dropout
from fiddlex.models.exchange import Exchange

# `(q_BSND, k_BSKD, v_BSKD, segments_BS) -> y`, see `fiddlex.models.attention.attend`
AttentionKernel = Callable[[jax.Array, jax.Array, jax.Array, jax.Array | None], jax.Array]


@dataclasses.dataclass(frozen=True)
class Context:
    """The settings of a forward pass."""

    sequence_parallel: bool  # whether activations between products are sharded along the sequence
    kernel: AttentionKernel | None = None  # the fused kernel of attention (`fiddlex.models.flash`), if there is one
    # parts of a layer that the backward pass makes again (`fiddlex.config.values.recompute`)
    recompute: frozenset[str] = frozenset()
    dropout: Dropout | None = None  # None when nothing is dropped
    causal: bool = True  # whether a position attends only to itself and to earlier positions
    # int32 [rows, whole sequence]; a position attends only to its own segment. None: each row is one segment
    segments_BS: jax.Array | None = None
    # of pieces of the sequence during products; None: the ranks exchange all of it before or after a product
    exchange: Exchange | None = None
    cache: LayerCache | None = None  # in incremental decoding, that of the layer

    @property
    def sequence_axes(self) -> tuple[str, ...]:
        """The mesh axes that cut the residual stream along the sequence."""
        return ("tensor",) * self.sequence_parallel

    def own_positions(self, length: int) -> jax.Array:
        """Where each of `length` positions of queries and keys is in its segment or text, int32 [rows or 1, length]."""
        return jnp.arange(length, dtype=jnp.int32)[None] if self.positions is None else self.positions

    @property
    def positions(self) -> jax.Array | None:
        """Where each token is in its segment or text, int32 [rows, whole sequence]; None: 0, 1, … in each row."""
        if self.cache is not None:
            return self.cache.positions
        return None if self.segments_BS is None else positions_in_segments(self.segments_BS)


def positions_in_segments(segments_BS: jax.Array) -> jax.Array:
    """Each position's distance from the start of its segment, int32 [B, S]; a segment's positions are contiguous."""
    indices_S = jnp.arange(segments_BS.shape[1], dtype=jnp.int32)
    before_BS = jnp.pad(segments_BS[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    starts_BS = jnp.where(segments_BS != before_BS, indices_S, 0)
    return indices_S - lax.cummax(starts_BS, axis=1)
