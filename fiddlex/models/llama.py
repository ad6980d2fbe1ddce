"""Llama and its descendants (`fiddlex.models.descriptions.llama`): RMSNorm, rotary positions, gated MLP, shared keys.

Shape suffixes as in `fiddlex.models.layers`, and K this rank's heads of keys and values.
"""

import functools

import jax
from jax import lax

from fiddlex.config import Config
from fiddlex.models.attention import attend
from fiddlex.models.context import Context
from fiddlex.models.decoder import Decoder
from fiddlex.models.dropout import ATTENTION_OUTPUT_SITE, MLP_OUTPUT_SITE
from fiddlex.models.layers import activated, biased, column_parallel, dropped, normed, row_parallel
from fiddlex.models.operators import gated_silu, rms_norm
from fiddlex.models.products import Input, given
from fiddlex.models.rotary import angular_frequencies, rotate
from fiddlex.models.weights import Weights


class Llama(Decoder):
    """A `Decoder` whose layers are those of Llama."""

    def __init__(self, config: Config):
        super().__init__(config)
        self._frequencies = tuple(angular_frequencies(config.model).tolist())
        self._replicas = self.network.attention.kv_replicas

    def layer(self, weights: Weights, x_BTH: jax.Array, context: Context) -> jax.Array:
        y_BTH = self._attention(weights["attention"], self._normed(weights["attention_norm"], x_BTH, context), context)
        x_BTH += dropped(y_BTH, ATTENTION_OUTPUT_SITE, context)
        y_BTH = self._mlp(weights["mlp"], self._normed(weights["mlp_norm"], x_BTH, context), context)
        return x_BTH + dropped(y_BTH, MLP_OUTPUT_SITE, context)

    def last_norm(self, weights: Weights, x_BTH: jax.Array) -> jax.Array:
        return self._norm(weights["head"]["norm"], x_BTH)

    def _norm(self, weights: Weights, x: jax.Array) -> jax.Array:
        return rms_norm(x, weights["scale"], self.config.layer_norm_epsilon)

    def _normed(self, weights: Weights, x_BTH: jax.Array, context: Context) -> Input:
        norm = functools.partial(rms_norm, epsilon=self.config.layer_norm_epsilon)
        return normed(norm, x_BTH, [weights["scale"]], context)

    def _attention(self, weights: Weights, x_BTH: Input, context: Context) -> jax.Array:
        """Self-attention with query heads sharded over `tensor`; returns the branch's output, [B, T, H]."""
        own = [weights["q"], *(jax.tree.map(self._own_head, weights[name]) for name in ("k", "v"))]
        made = column_parallel([each["kernel"] for each in own], x_BTH, context)
        q_BSND, k_BSKD, v_BSKD = map(biased, own, made)
        if self.config.qk_norm:
            q_BSND, k_BSKD = self._norm(weights["q_norm"], q_BSND), self._norm(weights["k_norm"], k_BSKD)
        positions_BS = context.own_positions(q_BSND.shape[1])
        q_BSND, k_BSKD = (rotate(x, positions_BS, self._frequencies) for x in (q_BSND, k_BSKD))
        return row_parallel(weights["out"], given(attend(q_BSND, k_BSKD, v_BSKD, context)), context)

    def _own_head(self, weight: jax.Array) -> jax.Array:
        """This rank's kernel [H, K, D] or bias [K, D] of keys or values: all, or the one head that its queries use."""
        if self._replicas == 1:
            return weight
        head = lax.axis_index("tensor") // self._replicas
        return lax.dynamic_slice_in_dim(weight, head, 1, axis=weight.ndim - 2)

    def _mlp(self, weights: Weights, x_BTH: Input, context: Context) -> jax.Array:
        """The gated MLP, hidden units sharded over `tensor`; returns the branch's output, [B, T, H]."""
        kernels = [weights[name]["kernel"] for name in ("gate", "up")]
        gate_BSF, up_BSF = column_parallel(kernels, x_BTH, context)
        return row_parallel(weights["down"], activated(gated_silu, [gate_BSF, up_BSF], context), context)
