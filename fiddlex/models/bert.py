"""BERT (Devlin et al., NAACL 2019): an encoder that sees both ways, with a head for each thing it is trained to do.

Post-LN as published, or pre-LN with a final LayerNorm, which large models need (Shoeybi et al. 2019, section 5.3).
Only what a head asks for is taken out of the sequence: masked positions, or the first position of each row. A head
stands on every device, as the executor has it: what it holds of the vocabulary is sharded, the rest is small.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from fiddlex.config import Config, ModelConfig
from fiddlex.models.context import Context
from fiddlex.models.functional import Weights, param
from fiddlex.models.layers import LayerNorm, Linear
from fiddlex.models.operators import add_bias, gelu, product
from fiddlex.models.transformer import Batch, Transformer, sums
from fiddlex.models.vocabulary import cross_entropy, likeliest, local_logits
from fiddlex.parallel.collectives import take_positions

NUM_TOKEN_TYPES = 2  # first and second text of a pair
POOLED_SITE = 1  # of dropout, in the layer after the last


class MaskedHead(nnx.Module):
    """The transform before the table of the embedding scores masked positions, and the table's bias."""

    def __init__(self, config: ModelConfig, rows: int, *, rngs: nnx.Rngs):
        shape = (config.hidden_size, config.hidden_size)
        self.transform = Linear(shape, ("hidden", None), num_inputs=1, std=config.init_std, rngs=rngs)
        self.norm = LayerNorm(config)
        self.bias = param(jnp.zeros(rows), ("vocab",))


class LabelHead(nnx.Module):
    """The pooler, a tanh layer on a row's first position, and a classifier on that.

    One number for each row, which competes with those of other rows, has no bias: it would cancel.
    """

    def __init__(self, config: ModelConfig, num_outputs: int, *, rngs: nnx.Rngs):
        hidden = config.hidden_size
        self.pooler = Linear((hidden, hidden), ("hidden", None), num_inputs=1, std=config.init_std, rngs=rngs)
        if num_outputs == 1:
            values = config.init_std * jax.random.normal(rngs.params(), (hidden, 1), jnp.float32)
            self.score = param(values, ("hidden", "classes"))
        else:
            axes = ("hidden", "classes")
            self.classifier = Linear((hidden, num_outputs), axes, num_inputs=1, std=config.init_std, rngs=rngs)


class Head(nnx.Module):
    """What stands after the layers."""

    def __init__(self, config: ModelConfig, rows: int, outputs: "Outputs", *, rngs: nnx.Rngs):
        if not config.post_norm:
            self.norm = LayerNorm(config)
        if outputs.tokens:
            self.masked = MaskedHead(config, rows, rngs=rngs)
        if outputs.labels:
            self.label = LabelHead(config, outputs.labels, rngs=rngs)


class Outputs(NamedTuple):
    """What a head says.

    Attributes:
      tokens: whether it tells masked tokens.
      labels: numbers that it gives a row: a logit of each class, one of a choice; 0: it tells no labels.
    """

    tokens: bool
    labels: int


def outputs(task: str, num_classes: int) -> Outputs:
    """What the head of a task says (`ModelConfig.task`)."""
    return {
        "mlm": Outputs(tokens=True, labels=0),
        "mlm_nsp": Outputs(tokens=True, labels=2),
        "mlm_sop": Outputs(tokens=True, labels=2),
        "classification": Outputs(tokens=False, labels=num_classes),
        "multiple_choice": Outputs(tokens=False, labels=1),
    }[task]


class BERT(Transformer[Head]):
    """Tells masked tokens, labels, or both: see `Transformer`.

    A batch has `tokens`, `segments` and `token_types`, int32 [example, S], in multiple choice [example, choice, S];
    with masked tokens also `masked_positions`, `targets` and `weights`, [example, P]; with labels `labels` and
    `label_weights`, [example].
    """

    causal = False

    def __init__(self, config: Config):
        self._outputs = says = outputs(config.model.task, len(config.data.classes))
        self.parts = ("tokens",) * says.tokens + ("labels",) * bool(says.labels)
        super().__init__(
            config,
            lambda rngs: Head(config.model, config.padded_vocab_size, says, rngs=rngs),
            num_token_types=NUM_TOKEN_TYPES,
        )

    def loss(self, weights: Weights, x_BTH: jax.Array, batch: Batch, context: Context) -> jax.Array:
        """See `Transformer`."""
        total = jnp.zeros((), jnp.float32)
        if self._outputs.tokens:
            losses_BP = cross_entropy(self._masked_logits(weights, x_BTH, batch, context), batch["targets"])
            total += jnp.sum(losses_BP * batch["weights"])
        if self._outputs.labels:
            losses_E = _negative_log_likelihood(self._label_logits(weights, x_BTH, batch, context), batch["labels"])
            total += _same_everywhere(jnp.sum(losses_E * batch["label_weights"]), context)
        return total

    def scores(self, weights: Weights, x_BTH: jax.Array, batch: Batch, context: Context) -> jax.Array:
        """See `Transformer`."""
        parts = []
        if self._outputs.tokens:
            logits_BPV, targets_BP = self._masked_logits(weights, x_BTH, batch, context), batch["targets"]
            right_BP = likeliest(logits_BPV) == targets_BP
            parts.append(sums(cross_entropy(logits_BPV, targets_BP), batch["weights"], right_BP))
        if self._outputs.labels:
            logits_EC, labels_E = self._label_logits(weights, x_BTH, batch, context), batch["labels"]
            right_E = jnp.argmax(logits_EC, axis=-1) == labels_E
            label_sums = sums(_negative_log_likelihood(logits_EC, labels_E), batch["label_weights"], right_E)
            parts.append(_same_everywhere(label_sums, context))
        return jnp.stack(parts, axis=1)

    def log_probabilities(self, weights: Weights, x_BTH: jax.Array, batch: Batch, context: Context) -> jax.Array:
        """Of the classes or choices, float32 [example, classes]."""
        logits_EC = self._label_logits(weights, x_BTH, batch, context)
        return _same_everywhere(jax.nn.log_softmax(logits_EC, axis=-1), context)

    def _masked_logits(self, weights: Weights, x_BTH: jax.Array, batch: Batch, context: Context) -> jax.Array:
        """This rank's slice of the logits at the masked positions, float32 [B, P, V / vocabulary shards]."""
        x_BPH = self._taken(weights, x_BTH, batch["masked_positions"], context)
        head = self._head.bind(weights["head"]).masked
        x_BPH = gelu(add_bias(product(x_BPH, head.transform.kernel[...]), head.transform.bias[...]))
        x_BPH = head.norm(x_BPH)
        if not context.sequence_parallel:
            x_BPH = lax.pcast(x_BPH, "tensor", to="varying")
        table_VH, vocab_size = weights["embedding"]["tokens"], self.config.vocab_size
        return local_logits(x_BPH, table_VH, vocab_size=vocab_size, bias_V=head.bias[...])

    def _label_logits(self, weights: Weights, x_BTH: jax.Array, batch: Batch, context: Context) -> jax.Array:
        """Logits of the classes or choices, float32 [example, classes]."""
        first_B1 = jnp.zeros((x_BTH.shape[0], 1), jnp.int32)
        x_B1H = self._taken(weights, x_BTH, first_B1, context)
        head = self._head.bind(weights["head"]).label
        x_B1H = jnp.tanh(add_bias(product(x_B1H, head.pooler.kernel[...]), head.pooler.bias[...]))
        if context.dropout is not None:
            dropout = context.dropout.in_layer(jnp.int32(self.config.num_layers))
            x_B1H = dropout.residual(x_B1H, POOLED_SITE, sequence_parallel=False)
        x_BH = x_B1H[:, 0].astype(jnp.float32)  # so that close choices do not tie in half precision
        if self._outputs.labels == 1:
            return (x_BH @ head.score[...].astype(jnp.float32)).reshape(len(batch["labels"]), -1)
        return x_BH @ head.classifier.kernel[...].astype(jnp.float32) + head.classifier.bias[...].astype(jnp.float32)

    def _taken(self, weights: Weights, x_BTH: jax.Array, positions_BP: jax.Array, context: Context) -> jax.Array:
        x_BPH = take_positions(x_BTH, positions_BP, sequence_parallel=context.sequence_parallel)
        return x_BPH if self.config.post_norm else self._head.bind(weights["head"]).norm(x_BPH)


def _negative_log_likelihood(logits_EC: jax.Array, labels_E: jax.Array) -> jax.Array:
    chosen_E1 = jnp.take_along_axis(jax.nn.log_softmax(logits_EC, axis=-1), labels_E[:, None], axis=-1)
    return -chosen_E1[:, 0]


def _same_everywhere(x: jax.Array, context: Context) -> jax.Array:
    """What every tensor rank has computed alike, as one value; with sequence parallelism the type says it varies."""
    return lax.pmean(x, "tensor") if context.sequence_parallel else x
