"""BERT (Devlin et al., NAACL 2019): a bidirectional encoder with one head for each part of its loss.

The network is post-LN as published, or pre-LN with a final LayerNorm, which large models need (Shoeybi et al. 2019,
section 5.3). A head takes only the masked positions from the sequence, or the first position of each row. Every device
computes the heads, as the executor requires: weights over the vocabulary are sharded, and the others are small.
"""

import jax
import jax.numpy as jnp
from jax import lax

from fiddlex.models.context import Context
from fiddlex.models.layers import linear, norm
from fiddlex.models.model import Batch, Model, sums
from fiddlex.models.operators import GELUS
from fiddlex.models.sharded_vocabulary import cross_entropy, likeliest, local_logits
from fiddlex.models.weights import Weights
from fiddlex.parallel.collectives import take_positions

POOLED_SITE = 1  # dropout site, in the layer after the last


class BERT(Model):
    """A `Model` that predicts masked tokens, labels, or both.

    A batch has `tokens`, `segments` and `token_types`, int32 [example, S], or in multiple choice [example, choice, S].
    With masked tokens it also has `masked_positions`, `targets` and `weights`, [example, P]; with labels it also has
    `labels` and `label_weights`, [example].
    """

    def loss(self, weights: Weights, x_BTH: jax.Array, batch: Batch, context: Context) -> jax.Array:
        total = jnp.zeros((), jnp.float32)
        if self.network.task.num_scored:
            losses_BP = cross_entropy(self._masked_logits(weights, x_BTH, batch, context), batch["targets"])
            total += jnp.sum(losses_BP * batch["weights"])
        if self.network.task.num_outputs:
            losses_E = _negative_log_likelihood(self._label_logits(weights, x_BTH, batch, context), batch["labels"])
            total += _same_everywhere(jnp.sum(losses_E * batch["label_weights"]), context)
        return total

    def scores(self, weights: Weights, x_BTH: jax.Array, batch: Batch, context: Context) -> jax.Array:
        parts = []
        if self.network.task.num_scored:
            logits_BPV, targets_BP = self._masked_logits(weights, x_BTH, batch, context), batch["targets"]
            right_BP = likeliest(logits_BPV) == targets_BP
            parts.append(sums(cross_entropy(logits_BPV, targets_BP), batch["weights"], right_BP))
        if self.network.task.num_outputs:
            logits_EC, labels_E = self._label_logits(weights, x_BTH, batch, context), batch["labels"]
            right_E = jnp.argmax(logits_EC, axis=-1) == labels_E
            label_sums = sums(_negative_log_likelihood(logits_EC, labels_E), batch["label_weights"], right_E)
            parts.append(_same_everywhere(label_sums, context))
        return jnp.stack(parts, axis=1)

    def log_probabilities(self, weights: Weights, x_BTH: jax.Array, batch: Batch, context: Context) -> jax.Array:
        """Log-probabilities of the classes or choices, float32 [example, classes]."""
        logits_EC = self._label_logits(weights, x_BTH, batch, context)
        return _same_everywhere(jax.nn.log_softmax(logits_EC, axis=-1), context)

    def _masked_logits(self, weights: Weights, x_BTH: jax.Array, batch: Batch, context: Context) -> jax.Array:
        """This rank's slice of the logits at the masked positions, float32 [B, P, V / vocabulary shards]."""
        x_BPH = self._taken(weights, x_BTH, batch["masked_positions"], context)
        head = weights["head"]["masked"]
        x_BPH = GELUS[self.config.gelu](linear(head["transform"], x_BPH))
        x_BPH = norm(head["norm"], x_BPH, self.config.layer_norm_epsilon)
        if not context.sequence_parallel:
            x_BPH = lax.pcast(x_BPH, "tensor", to="varying")
        table_VH, vocab_size = weights["embedding"]["tokens"], self.config.vocab_size
        return local_logits(x_BPH, table_VH, vocab_size=vocab_size, bias_V=head["bias"])

    def _label_logits(self, weights: Weights, x_BTH: jax.Array, batch: Batch, context: Context) -> jax.Array:
        """Logits of the classes or choices, float32 [example, classes]."""
        first_B1 = jnp.zeros((x_BTH.shape[0], 1), jnp.int32)
        x_B1H = self._taken(weights, x_BTH, first_B1, context)
        head = weights["head"]["label"]
        x_B1H = jnp.tanh(linear(head["pooler"], x_B1H))
        if context.dropout is not None:
            dropout = context.dropout.in_layer(jnp.int32(self.config.num_layers))
            x_B1H = dropout.residual(x_B1H, POOLED_SITE, ())
        x_BH = x_B1H[:, 0].astype(jnp.float32)  # so that close choices do not tie in half precision
        if "score" in head:
            return (x_BH @ head["score"].astype(jnp.float32)).reshape(len(batch["labels"]), -1)
        last = jax.tree.map(lambda w: w.astype(jnp.float32), head["classifier"])
        return x_BH @ last["kernel"] + last["bias"]

    def _taken(self, weights: Weights, x_BTH: jax.Array, positions_BP: jax.Array, context: Context) -> jax.Array:
        x_BPH = take_positions(x_BTH, positions_BP, context.sequence_axes)
        if "norm" not in weights["head"]:  # post-LN, in which the layers end with a norm
            return x_BPH
        return norm(weights["head"]["norm"], x_BPH, self.config.layer_norm_epsilon)


def _negative_log_likelihood(logits_EC: jax.Array, labels_E: jax.Array) -> jax.Array:
    chosen_E1 = jnp.take_along_axis(jax.nn.log_softmax(logits_EC, axis=-1), labels_E[:, None], axis=-1)
    return -chosen_E1[:, 0]


def _same_everywhere(x: jax.Array, context: Context) -> jax.Array:
    """Marks `x`, which is equal on all tensor ranks, as replicated; sequence parallelism types it as varying."""
    return lax.pmean(x, context.sequence_axes) if context.sequence_axes else x
