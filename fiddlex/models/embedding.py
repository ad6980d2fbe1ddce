"""What stands before the layers: tokens, positions and, in BERT, token types."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from fiddlex.config import ModelConfig
from fiddlex.models.context import Context
from fiddlex.models.dropout import EMBEDDING_SITE
from fiddlex.models.functional import param
from fiddlex.models.layers import LayerNorm
from fiddlex.models.vocabulary import embed_tokens
from fiddlex.parallel.sharding import LogicalAxes


class Embedding(nnx.Module):
    """Sums of learned vectors, with post-LN normalised, then dropped.

    Args:
      config: of the model.
      rows: of the token table, which is padded with zeros.
      num_token_types: rows of the table of token types; 0: there is none.
      rngs: random streams.
    """

    def __init__(self, config: ModelConfig, rows: int, num_token_types: int = 0, *, rngs: nnx.Rngs):
        def table(size: int, padded: int, axes: LogicalAxes) -> nnx.Param:
            values = config.init_std * jax.random.normal(rngs.params(), (size, config.hidden_size), jnp.float32)
            return param(jnp.pad(values, ((0, padded - size), (0, 0))), axes)

        self.tokens = table(config.vocab_size, rows, ("vocab", "hidden"))
        self.positions = table(config.seq_len, config.seq_len, ("positions", "hidden"))
        if num_token_types:
            self.token_types = table(num_token_types, num_token_types, ("token_types", "hidden"))
        if config.post_norm:
            self.norm = LayerNorm(config)

    def __call__(self, tokens_BS: jax.Array, token_types_BS: jax.Array | None, context: Context) -> jax.Array:
        """Embeds tokens; [B, T, H]. Positions count from 0 in every segment."""
        x_BTH = embed_tokens(self.tokens[...], tokens_BS, sequence_parallel=context.sequence_parallel)
        length = x_BTH.shape[1]
        first = lax.axis_index("tensor") * length if context.sequence_parallel else 0

        def looked_up(table: nnx.Param, ids_BS: jax.Array) -> jax.Array:
            # In float32, so that backward adds up the gradients of a row in float32.
            return table[...].astype(jnp.float32)[lax.dynamic_slice_in_dim(ids_BS, first, length, axis=1)]

        total_BTH = x_BTH.astype(jnp.float32)
        if context.segments_BS is None:
            positions = lax.dynamic_slice_in_dim(self.positions[...], first, length)
            total_BTH += positions.astype(jnp.float32)
        else:
            total_BTH += looked_up(self.positions, positions_in_segments(context.segments_BS))
        if token_types_BS is not None:
            total_BTH += looked_up(self.token_types, token_types_BS)
        x_BTH = total_BTH.astype(x_BTH.dtype)
        if hasattr(self, "norm"):
            x_BTH = self.norm(x_BTH)
        if context.dropout is None:
            return x_BTH
        return context.dropout.residual(x_BTH, EMBEDDING_SITE, sequence_parallel=context.sequence_parallel)


def positions_in_segments(segments_BS: jax.Array) -> jax.Array:
    """Each position's distance from the first of its segment, int32 [B, S]; a segment's positions are neighbours."""
    indices_S = jnp.arange(segments_BS.shape[1], dtype=jnp.int32)
    before_BS = jnp.pad(segments_BS[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    starts_BS = jnp.where(segments_BS != before_BS, indices_S, 0)
    return indices_S - lax.cummax(starts_BS, axis=1)
