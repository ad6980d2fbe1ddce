"""Memory of a train step's temporaries on one device, as the schedule's table and the model's formulas tell.

Letters as in `fiddlex.models.layers`: B examples of a microbatch, S positions, T a tensor rank's part of them under
sequence parallelism (else S), H hidden, F, N and A this tensor rank's part of the MLP, of the heads and of their joint
width. What a layer leaves for its backward pass is the sum of what its operators save (`fiddlex.models.operators`),
here named one by one; Korthikanti et al., MLSys 2023, section 4, count another model's the same way. Every device has
arrays of the same shapes, so the numbers hold for each of them. Invariant: a number here follows from the program; none
is fitted to what a compiler said. Imports no jax.

Against XLA's own account on the CPU backend, in float32, the totals of nine layouts were off by 9% at most (jax 0.10.2,
2026-11-21; `tests/simulate/test_step_memory.py`). That backend computes bfloat16 in float32, with copies of whole
stashes in it, so of bfloat16 nothing can be learned there. Not known here: cuDNN's flash attention, which keeps no
scores, and the few bytes that follow the batch (keys of dropout, losses, the schedule's table).
"""

import dataclasses
from typing import NamedTuple

from fiddlex.config import Config
from fiddlex.pipeline.lowering import Lowered
from fiddlex.pipeline.placement import LayerPlacement

FLOAT32, WORD, MASK = 4, 4, 1  # bytes of an element; words are those of the random generator


class Memory(NamedTuple):
    """Bytes of temporaries on one device, by what they are for.

    Attributes:
      stash: what forwards leave for their backwards, over all slots.
      weight_stash: what I leaves for W, over all slots.
      inboxes: what waits to be used, trash slots included, and the gradient under way.
      gradients: float32 sums of the weights' gradients.
      weights: weights in the compute dtype, where they are not the master weights themselves.
      working: what the pass through one layer, or through the head, has alive besides, whichever takes more.
      update: the gradients once reduced, when the loop has ended and its memory is free again.
    """

    stash: int
    weight_stash: int
    inboxes: int
    gradients: int
    weights: int
    working: int
    update: int

    @property
    def total(self) -> int:
        """Bytes at the fullest moment: in the loop over ticks, or in the update after it."""
        loop = self.stash + self.weight_stash + self.inboxes + self.weights + self.working
        return self.gradients + max(loop, self.update)


def step_memory(config: Config, lowered: Lowered, placement: LayerPlacement) -> Memory:
    """The temporaries of a train step; arguments (master weights, optimizer state, the batch) are not among them.

    Args:
      config: sizes.
      lowered: its schedule.
      placement: its layers on stages.
    """
    layer, rows = _Layer.of(config), placement.rows_per_chunk
    activation = layer.residual * layer.itemsize
    inbox_slots = lowered.forward_inbox_slots + 1 + lowered.backward_inbox_slots + 1
    parameters = layer.parameters * rows * placement.num_chunks + _outer_parameters(config)
    gradients = parameters * FLOAT32
    own_weights = layer.itemsize == FLOAT32 and not (config.optimizer.zero1 and config.mesh.data > 1)
    return Memory(
        stash=lowered.stash_slots * rows * layer.stashed(config.pipeline.recompute),
        weight_stash=lowered.weight_stash_slots * rows * layer.left(config.pipeline.recompute),
        inboxes=(inbox_slots + 1) * activation,
        gradients=gradients,
        weights=0 if own_weights else parameters * layer.itemsize,
        working=max(layer.working(config.pipeline.recompute), _head_working(config)),
        update=gradients // (config.mesh.data if config.optimizer.zero1 else 1),
    )


@dataclasses.dataclass(frozen=True)
class _Layer:
    """One layer's arrays, in elements unless they say bytes.

    Attributes:
      itemsize: bytes of an element in the compute dtype.
      residual: the residual stream, B·T·H.
      whole: the same as products take it, gathered under sequence parallelism, B·S·H.
      heads: the output of attention, or queries, or keys, or values, B·S·A.
      units: the hidden layer of the MLP, B·S·F.
      scores: attention's scores, B·N·S·S.
      dropout: whether anything is dropped.
      parameters: weights of a layer on this tensor rank.
      kernel: those of its largest product.
    """

    itemsize: int
    residual: int
    whole: int
    heads: int
    units: int
    scores: int
    dropout: bool
    parameters: int
    kernel: int

    @classmethod
    def of(cls, config: Config) -> "_Layer":
        model, tensor = config.model, config.mesh.tensor
        hidden, width, units = model.hidden_size, model.hidden_size // tensor, model.mlp_size // tensor
        heads, tokens = model.num_heads // tensor, config.microbatch_size * model.seq_len
        products = 4 * hidden * width + 2 * hidden * units
        return cls(
            itemsize=_itemsize(config),
            residual=tokens * hidden // (tensor if config.mesh.sequence_parallel else 1),
            whole=tokens * hidden,
            heads=tokens * width,
            units=tokens * units,
            scores=config.microbatch_size * heads * model.seq_len**2,
            dropout=model.dropout > 0,
            parameters=products + 3 * width + hidden + units + hidden + 4 * hidden,
            kernel=hidden * max(3 * width, units),
        )

    def stashed(self, recompute: str) -> int:
        """Bytes that a forward leaves: of everything, of all but attention's inside, or of the input alone."""
        if recompute == "full":
            return self._input()
        return self._input() + self._around_attention() + self._mlp() + self._attention() * (recompute == "none")

    def _input(self) -> int:
        """Bytes of the layer's input, which the first norm saves."""
        return self.residual * self.itemsize

    def _around_attention(self) -> int:
        """Bytes of the input of attention's first product, queries, keys, values, its output, and the mask of that."""
        return (self.whole + 4 * self.heads) * self.itemsize + self.residual * MASK * self.dropout

    def _attention(self) -> int:
        """Bytes of probabilities, and where some are dropped of those that are left and the mask."""
        return self.scores * (self.itemsize + (self.itemsize + MASK) * self.dropout)

    def _mlp(self) -> int:
        """Bytes of the inputs of the second norm, of both products and of GELU, and the mask of the output."""
        saved = self.residual + self.whole + 2 * self.units
        return saved * self.itemsize + self.residual * MASK * self.dropout

    def left(self, recompute: str) -> int:
        """Bytes that I leaves for W: gradients of the four products' outputs, and their inputs where not stashed."""
        gradients = 2 * self.whole + 3 * self.heads + self.units
        inputs = 2 * self.whole + self.heads + self.units
        return (gradients + inputs * (recompute == "full")) * self.itemsize

    def working(self, recompute: str) -> int:
        """Bytes at the fullest moment of the layer's passes: inside attention forward, MLP or attention backward.

        Forward alive is what attention is about to leave, the scores, and with dropout two random words for each score
        with the two of the round before. Backward it is what was computed again and is not yet used up, and the
        gradients of GELU's output and input, or of probabilities and scores. All along there are the kernel of the
        product at hand as read from the stack, its gradient, and what goes through the residual stream, in and out.
        """
        around, gradients = self._around_attention(), 2 * self.scores * FLOAT32
        inside = self._attention() + self.scores * FLOAT32
        forward = around + inside + 4 * self.scores * WORD * self.dropout
        in_mlp = (around + inside + self._mlp()) * (recompute == "full") + 2 * self.units * self.itemsize
        in_attention = around * (recompute == "full") + inside * (recompute != "none") + gradients
        return max(forward, in_mlp, in_attention) + 2 * (self.kernel + self.residual) * self.itemsize


def _head_working(config: Config) -> int:
    """Bytes of this device's slice of the logits, their exponentials and gradients, all float32, and of its input."""
    tokens, columns = (
        config.microbatch_size * config.model.seq_len,
        config.padded_vocab_size // config.mesh.vocab_shards,
    )
    hidden = tokens * config.model.hidden_size
    return 3 * tokens * columns * FLOAT32 + 3 * hidden * _itemsize(config)


def _outer_parameters(config: Config) -> int:
    """Weights outside the layers on one device: its slice of the table, positions, the last norm."""
    rows = config.padded_vocab_size // config.mesh.vocab_shards
    return (rows + config.model.seq_len + 2) * config.model.hidden_size


def _itemsize(config: Config) -> int:
    return {"float32": FLOAT32, "bfloat16": 2, "float16": 2}[config.model.dtype]
