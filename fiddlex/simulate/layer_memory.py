"""What the passes through one layer, and through the head, have in memory on one device.

Letters as in `fiddlex.models.layers`: B rows of a microbatch, S positions, T a tensor rank's part of them under
sequence parallelism (else S), H hidden, F, N and A this tensor rank's part of the MLP, of the heads and of their joint
width, V its slice of the vocabulary. What a layer leaves for its backward pass is the sum of what its operators save
(`fiddlex.models.operators`), here named one by one; Korthikanti et al., MLSys 2023, section 4, count another model's
the same way. Imports no jax.
"""

import dataclasses

from fiddlex.config import Config
from fiddlex.simulate.backend import Backend
from fiddlex.sizes import max_masked

FLOAT32, WORD, MASK = 4, 4, 1  # bytes of an element; words are those of the random generator
ITEMSIZES = {"float32": FLOAT32, "bfloat16": 2, "float16": 2}


def num_rows(config: Config) -> int:
    """Sequences in a microbatch, B."""
    return config.microbatch_size * (config.data.num_choices if config.model.task == "multiple_choice" else 1)


def num_masked(config: Config) -> int:
    """Positions of an example that a masked language model scores."""
    return max_masked(config.model.seq_len, config.data.mask_fraction) if config.model.task.startswith("mlm") else 0


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer's arrays, in elements unless they say bytes.

    Attributes:
      backend: what it runs on.
      recompute: what of it is computed again, see `PipelineConfig`.
      itemsize: bytes of an element in the compute dtype.
      operand: bytes of an element that nothing but products read.
      residual: the residual stream, B·T·H.
      whole: the same as products take it, gathered under sequence parallelism, B·S·H.
      heads: the output of attention, or queries, or keys, or values, B·S·A.
      units: the hidden layer of the MLP, B·S·F.
      scores: attention's scores, B·N·S·S.
      head_size: of one head.
      statistics: of the scores' rows, B·N·S.
      dropout: whether anything is dropped.
      flash: whether attention runs in a kernel that keeps no scores.
      qkv: weights of queries, keys and values, H·3·A.
      kernel: those of the largest product.
    """

    backend: Backend
    recompute: str
    itemsize: int
    operand: int
    residual: int
    whole: int
    heads: int
    units: int
    scores: int
    statistics: int
    head_size: int
    dropout: bool
    flash: bool
    qkv: int
    kernel: int

    @classmethod
    def of(cls, config: Config, backend: Backend) -> "Layer":
        """The layers of a config."""
        model, tensor = config.model, config.mesh.tensor
        hidden, width, units = model.hidden_size, model.hidden_size // tensor, model.mlp_size // tensor
        tokens, itemsize = num_rows(config) * model.seq_len, ITEMSIZES[model.dtype]
        return cls(
            backend=backend,
            recompute=config.pipeline.recompute,
            itemsize=itemsize,
            operand=min(itemsize, 2) if backend.rounds_products else itemsize,
            residual=tokens * hidden // (tensor if config.mesh.sequence_parallel else 1),
            whole=tokens * hidden,
            heads=tokens * width,
            units=tokens * units,
            scores=tokens * model.num_heads // tensor * model.seq_len,
            statistics=tokens * model.num_heads // tensor,
            head_size=model.head_size,
            dropout=model.dropout > 0,
            flash=backend.runs_flash(model),
            qkv=3 * hidden * width,
            kernel=hidden * max(3 * width, units),
        )

    def stashed(self) -> int:
        """Bytes that a forward leaves: of everything, of all but attention's inside, or of the input alone."""
        if self.recompute == "full":
            return self._input()
        attention = self._probabilities() * (self.recompute == "none" or self.flash)
        return self._input() + self._around_attention() + self._mlp() + attention

    def _input(self) -> int:
        """Bytes of the layer's input, which the first norm saves; in post-LN the second, of the sum before it."""
        return self.residual * self.itemsize

    def _around_attention(self) -> int:
        """Bytes of the input of attention's first product, queries, keys, values, its output, and the mask of that."""
        return (self.whole + 4 * self.heads) * self.operand + self.residual * MASK * self.dropout

    def _probabilities(self) -> int:
        """Bytes of probabilities, and where some are dropped of those that are left and the mask; of flash, sums."""
        if self.flash:
            return self.statistics * FLOAT32
        return self.scores * (self.itemsize + (self.operand + MASK) * self.dropout)

    def _mlp(self) -> int:
        """Bytes of the inputs of the second norm, of both products and of GELU, and the mask of the output."""
        by_products, others = self.whole + self.units, self.residual + self.units
        return by_products * self.operand + others * self.itemsize + self.residual * MASK * self.dropout

    def left(self) -> int:
        """Bytes that I leaves for W: gradients of the four products' outputs, and their inputs where not stashed."""
        gradients = 2 * self.whole + 3 * self.heads + self.units
        inputs = 2 * self.whole + self.heads + self.units
        return (gradients + inputs * (self.recompute == "full")) * self.operand

    def working(self) -> int:
        """Bytes at the fullest moment of the layer's passes: inside attention forward, MLP or attention backward.

        Backward alive is what was computed again and is not yet used up, and the gradients of GELU's output and input,
        or those inside attention. All along there are the kernel of the product at hand as read from the stack, its
        gradient, and what goes through the residual stream, in and out.
        """
        again, around = self.recompute == "full", self._around_attention()
        forward = self._attention_forward() + around * (not self.backend.fuses)
        inside = self._probabilities() if self.backend.fuses else self._softmax()
        in_mlp = (around + inside + self._mlp()) * again + 2 * self.units * self.itemsize
        in_attention = around * again + self._attention_backward()
        return max(forward, in_mlp, in_attention) + 2 * (self.kernel + self.residual) * self.itemsize

    def _softmax(self) -> int:
        """Bytes of the scores and of what attention leaves."""
        return self.scores * FLOAT32 * (not self.flash) + self._probabilities()

    def _attention_forward(self) -> int:
        """Bytes of scores; unless all is fused, of what it leaves, and two random words a score with the two before."""
        if self.backend.fuses:
            return self.scores * FLOAT32
        words = 4 * self.scores * WORD * (self.dropout and not self.backend.draws_inside)
        return self._softmax() + words

    def _attention_backward(self) -> int:
        """Bytes of scores and probabilities, read or computed again, and of the gradients of both."""
        if self.flash:  # gradients of queries, keys, values and of what comes out, in float32 the first
            return self._probabilities() + self.heads * (FLOAT32 + 3 * self.itemsize)
        if self.backend.rounds_gradients:
            return self._softmax() + 2 * self.scores * self.itemsize
        if not self.backend.fuses:
            return self._softmax() * (self.recompute != "none") + 2 * self.scores * FLOAT32
        if self.recompute == "none":  # as they are read, as the products want them, and both gradients
            return self.scores * (self.itemsize + 3 * self.operand)
        weighted = FLOAT32 if self.head_size > self.backend.narrow_head else 0
        return self.scores * (FLOAT32 + self.itemsize + weighted)

    def copied(self) -> int:
        """Bytes of the weights, in a row of the stack, that the backend copies (`Backend.whole_lanes_copy`)."""
        copies = self.backend.whole_lanes_copy and self.head_size % self.backend.lanes == 0
        return self.qkv * self.operand if copies else 0


def outside_layers(config: Config, backend: Backend) -> int:
    """Bytes at the fullest moment of embedding and head, whichever takes more.

    The head has this device's slice of the logits, B·P·V where it scores P positions of a row, in float32; unless all
    is fused their exponentials and gradients too, or of these the rounded ones alone (`Backend.rounds_gradients`); and
    what it scores, with its gradients. The embedding's backward pass has the gradient of the table's slice, V·H, in
    float32, before and, unless `Backend.scatters_in_place`, after rows are added to it.
    """
    model, itemsize = config.model, ITEMSIZES[config.model.dtype]
    columns = config.padded_vocab_size // config.mesh.vocab_shards
    tokens = num_rows(config) * model.seq_len
    scored = tokens if model.task == "lm" else num_rows(config) * num_masked(config)
    of_logit = FLOAT32 if backend.fuses else FLOAT32 + itemsize if backend.rounds_gradients else 3 * FLOAT32
    logits = scored * columns * of_logit
    stream = 3 * tokens * model.hidden_size * itemsize
    tables = (1 if backend.scatters_in_place else 2) * columns * model.hidden_size * FLOAT32
    return stream + max(logits, tables)
