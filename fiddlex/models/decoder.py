"""Next-token prediction: the loss and the scores of any decoder, and the logits from which it samples."""

import abc

import jax
import jax.numpy as jnp

from fiddlex.models.context import Context
from fiddlex.models.model import Batch, Model, sums
from fiddlex.models.sharded_vocabulary import cross_entropy, likeliest, local_logits
from fiddlex.models.weights import Weights
from fiddlex.parallel.collectives import enter_tensor_parallel


class NextTokenModel(Model):
    """A `Model` that predicts the next token. A batch has `tokens`, `targets` and `weights`, [example, S]."""

    @abc.abstractmethod
    def logits(self, weights: Weights, x_BTH: jax.Array, context: Context) -> jax.Array:
        """This rank's logits, float32 [B, S, V / vocabulary shards], as `without_padding` returns them."""

    def loss(self, weights: Weights, x_BTH: jax.Array, batch: Batch, context: Context) -> jax.Array:
        logits_BSV = self.logits(weights, x_BTH, context)
        return jnp.sum(cross_entropy(logits_BSV, batch["targets"]) * batch["weights"])

    def scores(self, weights: Weights, x_BTH: jax.Array, batch: Batch, context: Context) -> jax.Array:
        logits_BSV = self.logits(weights, x_BTH, context)
        losses_BS, targets_BS = cross_entropy(logits_BSV, batch["targets"]), batch["targets"]
        return sums(losses_BS, batch["weights"], likeliest(logits_BSV) == targets_BS)[:, None]


class Decoder(NextTokenModel):
    """A `NextTokenModel` that scores with a table after a last norm."""

    @abc.abstractmethod
    def last_norm(self, weights: Weights, x_BTH: jax.Array) -> jax.Array:
        """The residual stream after the layers, normalised."""

    def table(self, weights: Weights) -> jax.Array:
        """This rank's rows of the table that scores the vocabulary, of head or tied embedding, [V / shards, H]."""
        table: jax.Array = weights["embedding"]["tokens"] if self.config.tied_embeddings else weights["head"]["output"]
        return table

    def logits(self, weights: Weights, x_BTH: jax.Array, context: Context) -> jax.Array:
        x_BTH = self.last_norm(weights, x_BTH)
        x_BSH = enter_tensor_parallel(x_BTH, sequence_parallel=context.sequence_parallel)
        return local_logits(x_BSH, self.table(weights), vocab_size=self.config.vocab_size)

    def next_logits(self, weights: Weights, x_BSH: jax.Array, batch: Batch, context: Context) -> jax.Array:
        """This rank's logits at the last position, float32 [B, V / vocabulary shards], without sequence parallelism."""
        del batch
        return self.logits(weights, x_BSH[:, -1:], context)[:, 0]
