"""The embedding before the layers: tokens, learned positions unless they are rotary, and in BERT token types."""

import jax
import jax.numpy as jnp
from jax import lax

from fiddlex.models.context import Context
from fiddlex.models.dropout import EMBEDDING_SITE
from fiddlex.models.layers import dropped, norm
from fiddlex.models.sharded_vocabulary import embed_tokens
from fiddlex.models.weights import Weights
from fiddlex.parallel.collectives import first_position


def embed(
    weights: Weights, tokens_BS: jax.Array, token_types_BS: jax.Array | None, context: Context, *, epsilon: float
) -> jax.Array:
    """Sums the learned vectors of tokens, positions and token types, then applies the norm, if any, and dropout.

    Weights are the table `tokens`, and where the model has them `positions`, `token_types` and `norm`. Ids are int32.
    Returns the residual stream before the layers, [B, T, H].
    """
    x_BTH = embed_tokens(weights["tokens"], tokens_BS, sequence_parallel=context.sequence_parallel)
    length = x_BTH.shape[1]
    first = first_position(length, context.sequence_axes)

    def looked_up(name: str, ids_BS: jax.Array) -> jax.Array:
        # In float32, so that the backward pass sums the gradients of a row in float32.
        return weights[name].astype(jnp.float32)[lax.dynamic_slice_in_dim(ids_BS, first, length, axis=1)]

    total_BTH = x_BTH.astype(jnp.float32)
    if "positions" in weights:
        if context.positions is None:
            total_BTH += lax.dynamic_slice_in_dim(weights["positions"], first, length).astype(jnp.float32)
        else:
            total_BTH += looked_up("positions", context.positions)
    if token_types_BS is not None and "token_types" in weights:
        total_BTH += looked_up("token_types", token_types_BS)
    x_BTH = total_BTH.astype(x_BTH.dtype)
    if "norm" in weights:
        x_BTH = norm(weights["norm"], x_BTH, epsilon)
    return dropped(x_BTH, EMBEDDING_SITE, context)
