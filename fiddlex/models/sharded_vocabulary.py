"""Embedding and cross-entropy with the vocabulary sharded over `pipe` × `tensor`.

Every device embeds and scores its own slice of the vocabulary; no device ever holds the logits of the whole vocabulary
(Megatron-LM, section 3, extended to the pipeline axis so that the first and last stage cost no more than the others).
The loss is exact: maximum, sum of exponentials and target logit are each reduced over the shards. Rows beyond
`vocab_size` only make the shards equal in size: these rows start at zero, are never scored, and receive no gradient.
"""

import jax
import jax.numpy as jnp
from jax import lax

from fiddlex.models.operators import scores
from fiddlex.parallel.axes import MESH_AXES
from fiddlex.parallel.collectives import leave_tensor_parallel

VOCAB_AXES = MESH_AXES["vocab"]


def embed_tokens(table_VH: jax.Array, tokens_BS: jax.Array, *, sequence_parallel: bool) -> jax.Array:
    """Looks up tokens, int32 ids in the whole vocabulary, in this rank's rows of the table and sums over the ranks.

    Returns [B, T, H] in the table's dtype; with `sequence_parallel` T is the rank's part of the sequence.
    """
    local_BS = tokens_BS - _first_row(table_VH)
    mine_BS = (local_BS >= 0) & (local_BS < table_VH.shape[0])
    # Looked up in float32, so that the backward pass sums the gradients of a frequent token in float32.
    rows_BSH = table_VH.astype(jnp.float32)[jnp.where(mine_BS, local_BS, 0)]
    rows_BSH = jnp.where(mine_BS[..., None], rows_BSH, 0).astype(table_VH.dtype)
    return leave_tensor_parallel(lax.psum(rows_BSH, "pipe"), sequence_parallel=sequence_parallel)


def local_logits(
    x_BSH: jax.Array, table_VH: jax.Array, *, vocab_size: int, bias_V: jax.Array | None = None
) -> jax.Array:
    """Scores this rank's slice of the vocabulary, float32 [B, S, V] for V rows, as `without_padding` returns it.

    `x_BSH` comes from `enter_tensor_parallel` and is the same on every pipe rank. `vocab_size` is that of the whole
    vocabulary, without padding. `bias_V`, of this rank's rows, is added in float32.
    """
    logits_BSV = scores(lax.pcast(x_BSH, "pipe", to="varying"), table_VH)
    if bias_V is not None:
        logits_BSV += bias_V.astype(jnp.float32)
    return without_padding(logits_BSV, vocab_size)


def without_padding(logits_BSV: jax.Array, vocab_size: int) -> jax.Array:
    """This rank's slice of the logits, float32; rows that pad the vocabulary score the lowest float."""
    if logits_BSV.shape[-1] * lax.axis_size(VOCAB_AXES) == vocab_size:
        return logits_BSV
    return jnp.where(_rows(logits_BSV) < vocab_size, logits_BSV, jnp.finfo(jnp.float32).min)


def cross_entropy(logits_BSV: jax.Array, targets_BS: jax.Array) -> jax.Array:
    """Negative log-likelihood of each target, float32 [B, S], exact and the same on every rank of `pipe` and `tensor`.

    `logits_BSV` is this rank's slice, float32 (`local_logits`); targets are int32 ids in the whole vocabulary.
    """
    highest_BS = lax.pmax(lax.stop_gradient(logits_BSV).max(axis=-1), VOCAB_AXES)
    shifted_BSV = logits_BSV - highest_BS[..., None]
    rows_V = _rows(logits_BSV)
    target_BSV = jnp.where(rows_V == targets_BS[..., None], shifted_BSV, 0)
    total_BS, target_BS = lax.psum((jnp.exp(shifted_BSV).sum(axis=-1), target_BSV.sum(axis=-1)), VOCAB_AXES)
    return jnp.log(total_BS) - target_BS


def likeliest(logits_BSV: jax.Array) -> jax.Array:
    """The id with the highest logit in the whole vocabulary, int32 [B, S]; in a tie, the lowest such id."""
    highest_BS = lax.pmax(logits_BSV.max(axis=-1), VOCAB_AXES)
    rows_BSV = jnp.where(logits_BSV == highest_BS[..., None], _rows(logits_BSV), jnp.iinfo(jnp.int32).max)
    return lax.pmin(rows_BSV.min(axis=-1), VOCAB_AXES)


def _rows(logits_BSV: jax.Array) -> jax.Array:
    return lax.axis_index(VOCAB_AXES) * logits_BSV.shape[-1] + jnp.arange(logits_BSV.shape[-1])


def _first_row(table_VH: jax.Array) -> jax.Array:
    return lax.axis_index(VOCAB_AXES) * table_VH.shape[0]
