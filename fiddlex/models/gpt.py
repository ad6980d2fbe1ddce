"""GPT-2 (Radford et al. 2019): pre-LN decoder, learned positions, tied embeddings."""

import jax
import jax.numpy as jnp
from flax import nnx

from fiddlex.config import Config, ModelConfig
from fiddlex.models.context import Context
from fiddlex.models.functional import Weights
from fiddlex.models.layers import LayerNorm
from fiddlex.models.transformer import Batch, Transformer, sums
from fiddlex.models.vocabulary import cross_entropy, likeliest, local_logits
from fiddlex.parallel.collectives import enter_tensor_parallel


class Head(nnx.Module):
    """The final LayerNorm; scoring uses the embedding's table."""

    def __init__(self, config: ModelConfig):
        self.norm = LayerNorm(config)


class GPT(Transformer[Head]):
    """Predicts the next token: see `Transformer`. A batch has `tokens`, `targets` and `weights`, [example, S]."""

    causal = True
    parts = ("tokens",)

    def __init__(self, config: Config):
        super().__init__(config, lambda rngs: Head(config.model))

    def loss(self, weights: Weights, x_BTH: jax.Array, batch: Batch, context: Context) -> jax.Array:
        """See `Transformer`."""
        losses_BS = cross_entropy(self._logits(weights, self._normed(weights, x_BTH, context)), batch["targets"])
        return jnp.sum(losses_BS * batch["weights"])

    def scores(self, weights: Weights, x_BTH: jax.Array, batch: Batch, context: Context) -> jax.Array:
        """See `Transformer`."""
        logits_BSV = self._logits(weights, self._normed(weights, x_BTH, context))
        losses_BS, targets_BS = cross_entropy(logits_BSV, batch["targets"]), batch["targets"]
        return sums(losses_BS, batch["weights"], likeliest(logits_BSV) == targets_BS)[:, None]

    def next_logits(self, weights: Weights, x_BTH: jax.Array, batch: Batch, context: Context) -> jax.Array:
        """This rank's slice of the logits at `batch["positions"]`, int32 [B]; float32 [B, V / vocabulary shards]."""
        x_BSH = self._normed(weights, x_BTH, context)
        x_B1H = jnp.take_along_axis(x_BSH, batch["positions"][:, None, None], axis=1)
        return self._logits(weights, x_B1H)[:, 0]

    def _normed(self, weights: Weights, x_BTH: jax.Array, context: Context) -> jax.Array:
        x_BTH = self._head.bind(weights["head"]).norm(x_BTH)
        return enter_tensor_parallel(x_BTH, sequence_parallel=context.sequence_parallel)

    def _logits(self, weights: Weights, x_BSH: jax.Array) -> jax.Array:
        return local_logits(x_BSH, weights["embedding"]["tokens"], vocab_size=self.config.vocab_size)
