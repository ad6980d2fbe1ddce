"""Which tokens BERT has to predict, and which tokens replace them in the input.

Devlin et al. 2019 (arXiv:1810.04805), section 3.1 and appendix A.1: a share of the tokens is drawn; 80% of these become
the mask token, 10% a random token, and 10% stay unchanged.

Invariant: the draws are a function of seed, epoch and index of the example; special tokens are never drawn.
"""

import numpy as np

from fiddlex.data.tokenizers import Tokenizer, require_special
from fiddlex.errors import DataError
from fiddlex.models.task_sizes import max_masked

_MASKED_SHARE, _RANDOM_SHARE = 0.8, 0.1


def example_rng(seed: int, *, epoch: int, index: int) -> np.random.Generator:
    """Random numbers of one example in one epoch: its own part of a counter-based stream."""
    return np.random.Generator(np.random.Philox(key=seed, counter=(0, 0, index, epoch)))


class Masker:
    """Draws the tokens to predict, `mask_fraction` of those that are not special and at least one, and masks them.

    With `whole_words`, words are drawn instead of tokens, in random order, and each word is taken that fits into the
    number still to be masked, as BERT's published code does. If no word fits, single tokens are drawn instead.

    Raises:
      DataError: when the tokenizer is None, its vocabulary lacks special tokens, or marks no words for `whole_words`.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, seq_len: int, mask_fraction: float, whole_words: bool):
        self.special = require_special(tokenizer)
        assert tokenizer is not None  # require_special raises
        self.vocabulary = tokenizer.vocabulary
        if whole_words and not self.vocabulary.marks_words:
            raise DataError(
                f"data.whole_words=True with data.tokenizer={self.vocabulary.name!r}, whose vocabulary does not tell "
                "where words begin (no ## of WordPiece, Ġ of byte-level BPE or ▁ of SentencePiece). Use "
                "data.whole_words=False or another tokenizer."
            )
        self._most = max_masked(seq_len, mask_fraction)
        self._mask_fraction = mask_fraction
        self._whole_words = whole_words

    def mask(self, tokens: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Masks a share of `tokens`, int32[seq_len].

        Returns:
          `tokens` int32[seq_len], the model's input. With P = `max_masked(seq_len, mask_fraction)`: `masked_positions`
          int32[P], ascending; `targets` int32[P], the original tokens at these positions; `weights` float32[P], 1. If
          fewer than P tokens are predicted, or none, the remaining positions, targets and weights are 0.
        """
        positions = self._draw(tokens, rng)
        count = len(positions)
        masked_positions, targets = np.zeros((2, self._most), np.int32)
        masked_positions[:count] = positions
        targets[:count] = tokens[positions]
        masked = tokens.copy()
        masked[positions] = self._replacements(targets[:count], rng)
        weights = (np.arange(self._most) < count).astype(np.float32)
        return {"tokens": masked, "masked_positions": masked_positions, "targets": targets, "weights": weights}

    def _draw(self, tokens: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Positions to predict, ascending; never more than P, since rounding is monotonic."""
        maskable = np.flatnonzero(~self.vocabulary.is_special[tokens])
        if not len(maskable):
            return maskable
        count = max_masked(len(maskable), self._mask_fraction)
        if self._whole_words:
            starts = np.flatnonzero(self.vocabulary.starts_words(tokens)[maskable])
            lengths = np.diff(starts, append=len(maskable))
            chosen = _fitting(lengths, count, rng)
            if chosen.any():
                return maskable[np.repeat(chosen, lengths)]
        return np.sort(rng.permutation(maskable)[:count])

    def _replacements(self, targets: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        share = rng.random(len(targets))
        drawable = self.vocabulary.drawable
        random = drawable[rng.integers(len(drawable), size=len(targets))]
        kept = np.where(share < _MASKED_SHARE + _RANDOM_SHARE, random, targets)
        return np.where(share < _MASKED_SHARE, self.special.mask, kept)


def _fitting(lengths: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """bool[words]: whether a word is chosen: it fits into what the words drawn before it leave of `count` tokens."""
    chosen = np.zeros(len(lengths), bool)
    sizes = lengths.tolist()
    for word in rng.permutation(len(lengths)).tolist():
        if sizes[word] <= count:
            chosen[word] = True
            count -= sizes[word]
            if not count:
                break
    return chosen
