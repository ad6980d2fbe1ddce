"""Next-token prediction: the loss and the scores of any decoder, and the logits from which it samples."""

import abc

import jax
import jax.numpy as jnp

from fiddlex.models.context import Context
from fiddlex.models.model import Batch, Model, sums
from fiddlex.models.sharded_vocabulary import cross_entropy, likeliest, local_logits
from fiddlex.models.weights import Weights
from fiddlex.parallel.collectives import enter_tensor_parallel


class Decoder(Model):
    """A `Model` that predicts the next token. A batch has `tokens`, `targets` and `weights`, [example, S]."""

    @abc.abstractmethod
    def last_norm(self, weights: Weights, x_BTH: jax.Array) -> jax.Array:
        """The residual stream after the layers, normalised."""

    def table(self, weights: Weights) -> jax.Array:
        """This rank's rows of the table that scores the vocabulary, of head or tied embedding, [V / shards, H]."""
        table: jax.Array = weights["embedding"]["tokens"] if self.config.tied_embeddings else weights["head"]["output"]
        return table

    def loss(self, weights: Weights, x_BTH: jax.Array, batch: Batch, context: Context) -> jax.Array:
        logits_BSV = self._logits(weights, self._gathered(weights, x_BTH, context))
        return jnp.sum(cross_entropy(logits_BSV, batch["targets"]) * batch["weights"])

    def scores(self, weights: Weights, x_BTH: jax.Array, batch: Batch, context: Context) -> jax.Array:
        logits_BSV = self._logits(weights, self._gathered(weights, x_BTH, context))
        losses_BS, targets_BS = cross_entropy(logits_BSV, batch["targets"]), batch["targets"]
        return sums(losses_BS, batch["weights"], likeliest(logits_BSV) == targets_BS)[:, None]

    def next_logits(self, weights: Weights, x_BSH: jax.Array, batch: Batch, context: Context) -> jax.Array:
        """This rank's logits at the last position, float32 [B, V / vocabulary shards], without sequence parallelism."""
        return self._logits(weights, self._gathered(weights, x_BSH[:, -1:], context))[:, 0]

    def _gathered(self, weights: Weights, x_BTH: jax.Array, context: Context) -> jax.Array:
        """The normalised residual stream of whole sequences, on every tensor rank."""
        x_BTH = self.last_norm(weights, x_BTH)
        return enter_tensor_parallel(x_BTH, sequence_parallel=context.sequence_parallel)

    def _logits(self, weights: Weights, x_BSH: jax.Array) -> jax.Array:
        return local_logits(x_BSH, self.table(weights), vocab_size=self.config.vocab_size)
