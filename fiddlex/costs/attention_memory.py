"""The memory of the inside of attention on one device: its scores, their softmax and dropout, or its fused kernel."""

import dataclasses

from fiddlex.config.values.recompute import FULL
from fiddlex.costs.backend import Backend
from fiddlex.hardware.flash import BLOCKED, SPLASH, block_length
from fiddlex.models.device_arrays import FLOAT32, WORD, DeviceArrays, Saved
from fiddlex.models.spec import Attention


@dataclasses.dataclass(frozen=True)
class AttentionMemory:
    """The memory that the inside of a layer's attention takes; sizes are in elements unless a line says bytes."""

    arrays: DeviceArrays
    backend: Backend
    attention: Attention
    kernel: str  # the fused kernel, which saves no scores (`FlashKernel.name`); empty: none

    @property
    def head_size(self) -> int:
        return self.attention.head_size

    @property
    def _scores(self) -> int:
        return self.attention.scores(self.arrays)

    @property
    def _block_scores(self) -> int:
        """The scores of a block of queries, as the kernel blocked computes them."""
        return self.attention.rows(self.arrays) * block_length(self.arrays.seq_len)

    @property
    def _by_head(self) -> int:
        """Queries, keys, values and the result, each head padded as splash reads it."""
        heads = self.arrays.tokens * (self.attention.width + self.attention.kv_width) // self.arrays.tensor
        return 2 * (heads // self.head_size) * self.backend.in_lanes(self.head_size)

    @property
    def saves(self) -> bool:
        """Whether the inside saves anything; a fused kernel does even if it recomputes its inside."""
        return bool(self.kernel) or "attention" not in self.arrays.recompute

    def saved(self) -> list[Saved]:
        """The activations that the inside saves; a flash kernel saves none."""
        if self.kernel:
            return []
        # the probabilities and, with dropout, those after it, unless the backward pass makes these again
        keeps_after, width = self.arrays.dropout and "masks" not in self.arrays.recompute, self.arrays.seq_len
        after = [Saved(self._scores, width, self.arrays.operand, of_product=True)] * keeps_after
        return [Saved(self._scores, width, self.arrays.itemsize), *after]

    def rest(self) -> int:
        """Bytes of what else the inside saves: a mask, or in a flash kernel a sum for each row."""
        return self.attention.rows(self.arrays) * FLOAT32 if self.kernel else self.arrays.mask(self._scores)

    def probabilities(self) -> int:
        """Bytes that the inside saves, as the forward pass makes them."""
        return sum(each.bytes for each in self.saved()) + self.rest()

    def softmax(self) -> int:
        """Bytes of the scores, and of the arrays that the inside saves."""
        return self._scores * FLOAT32 * (not self.kernel) + self.probabilities()

    def forward(self) -> int:
        """Bytes that the forward pass holds."""
        if self.kernel == BLOCKED:
            # the scores of a block of queries, and their exponentials
            return 2 * self._block_scores * FLOAT32 + self.probabilities()
        if self.kernel == SPLASH:
            # It reads and writes heads one after the other, and writes its sum of each row of the scores to all lanes.
            rows = self.attention.rows(self.arrays)
            return self._by_head * self.arrays.itemsize + rows * self.backend.lanes * FLOAT32
        if self.backend.fuses:
            return self._scores * FLOAT32
        # for the dropout of each score, two random words and the two words before them
        words = 4 * self._scores * WORD * (self.arrays.dropout and not self.backend.draws_inside)
        return self.softmax() + words

    def backward(self) -> int:
        """Bytes of scores and probabilities, which are read or recomputed, and of the gradients of both."""
        scores, itemsize = self._scores, self.arrays.itemsize
        if self.kernel == BLOCKED:  # probabilities and scores, both with gradients, and what was read or given by head
            return self.probabilities() + 4 * self._block_scores * FLOAT32 + 2 * self._by_head * itemsize
        if self.kernel == SPLASH:  # what the forward pass reads and gives, and the gradients of it
            return self.probabilities() + 2 * self._by_head * itemsize
        if self.kernel:  # gradients of queries in float32, and of keys, values and the output in the compute dtype
            heads = self.attention.rows(self.arrays) * self.head_size
            return self.probabilities() + heads * (FLOAT32 + 3 * itemsize)
        if self.backend.rounds_gradients:
            return self.softmax() + 2 * scores * itemsize
        again = bool(self.arrays.recompute & {"attention", FULL})  # whether it computes the scores again
        if not self.backend.fuses:
            return self.softmax() * again + 2 * scores * FLOAT32
        if not again:  # probabilities as read, probabilities as operands, and both gradients
            return scores * (itemsize + 3 * self.arrays.operand)
        # for larger heads, the product of the probabilities and their gradient, in float32
        weighted = FLOAT32 if self.head_size > self.backend.narrow_head else 0
        return scores * (FLOAT32 + itemsize + weighted)
