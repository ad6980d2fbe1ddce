"""The key-value cache of one layer in incremental decoding, where a pass has only the tokens that are new.

Each row of the batch has its tokens in consecutive slots of the cache, and all rows write the same slots in a pass: a
row with fewer tokens than others begins at a later slot. The position of a token in its text is the distance of its
slot from the first slot of its row.

Shape suffixes: B row, S slot of the cache, T new token, N this rank's heads of queries, K this rank's heads of keys and
values, G queries that share a key (N = K · G), D head size.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp


@dataclasses.dataclass
class LayerCache:
    """What a layer's attention reads of earlier tokens, and what it adds for new ones."""

    slots_BT: jax.Array  # int32, the slot of each new token
    starts_B: jax.Array  # int32, the first slot of each row; what lies before it is padding
    # keys and values [B, S, K, D] of slots before the new tokens, any finite values in all others; (): none are earlier
    earlier: tuple[jax.Array, ...] = ()
    new: tuple[jax.Array, ...] = ()  # keys and values of the new tokens, [B, T, K, D] each, once `attend` was called

    @property
    def positions(self) -> jax.Array:
        """The position of each new token in its text, int32; 0 in the padding."""
        return jnp.maximum(self.slots_BT - self.starts_B[:, None], 0)

    def attend(self, q_BTND: jax.Array, k_BTKD: jax.Array, v_BTKD: jax.Array) -> jax.Array:
        """Attention of the new tokens to the earlier tokens of their row, to themselves and to new ones before them.

        Queries and keys are rotated where positions are rotary; `new` keeps keys and values. A query in the padding
        gets an arbitrary finite result. Returns [B, T, N, D] in the dtype of the inputs.
        """
        assert not self.new, "a layer attends once"
        self.new = (k_BTKD, v_BTKD)
        batch, length, heads, size = q_BTND.shape
        kv_heads = k_BTKD.shape[2]
        q_BTKGD = q_BTND.reshape(batch, length, kv_heads, heads // kv_heads, size)
        pairs, scores = [self.new], [_scores(q_BTKGD, k_BTKD, self._visible(self.slots_BT))]
        if self.earlier:
            slots_1S = jnp.arange(self.earlier[0].shape[1], dtype=jnp.int32)[None]
            written_11S = slots_1S[:, None] < self.slots_BT[:, :1, None]
            pairs.insert(0, (self.earlier[0], self.earlier[1]))
            scores.insert(0, _scores(q_BTKGD, self.earlier[0], self._visible(slots_1S) & written_11S))
        probabilities = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1).astype(q_BTND.dtype)
        ends = [part.shape[-1] for part in scores[:-1]]
        parts = jnp.split(probabilities, ends, axis=-1)
        y_BTKGD = sum(
            jnp.einsum("bkgts,bskd->btkgd", part, values) for part, (_, values) in zip(parts, pairs, strict=True)
        )
        return jnp.asarray(y_BTKGD).reshape(batch, length, heads, size)

    def _visible(self, slots_BS: jax.Array) -> jax.Array:
        """Which slots a new token sees, bool [B, T, S]: those of its row, up to its own."""
        slots_B1S = slots_BS[:, None]
        return (slots_B1S <= self.slots_BT[..., None]) & (slots_B1S >= self.starts_B[:, None, None])


def _scores(q_BTKGD: jax.Array, k_BSKD: jax.Array, visible_BTS: jax.Array) -> jax.Array:
    """Scaled products of queries and keys, float32 [B, K, G, T, S]; the lowest float where a key is not visible."""
    scores = jnp.einsum("btkgd,bskd->bkgts", q_BTKGD, k_BSKD, preferred_element_type=jnp.float32)
    return jnp.where(visible_BTS[:, None, None], scores / math.sqrt(q_BTKGD.shape[-1]), jnp.finfo(jnp.float32).min)
