"""Which tokens BERT has to predict, and what it sees in their place.

Devlin et al. 2019 (arXiv:1810.04805), section 3.1 and appendix A.1: a share of the tokens is drawn; of these 80% become
the mask token, 10% a random one, and 10% stay as they are.

Invariant: what is drawn is a function of seed, epoch and index of the example; special tokens are never drawn.
"""

import numpy as np

from fiddlex.data.tokenizers import Tokenizer, require_special
from fiddlex.errors import DataError
from fiddlex.models.task_sizes import max_masked

_MASKED_SHARE, _RANDOM_SHARE = 0.8, 0.1


def example_rng(seed: int, *, epoch: int, index: int) -> np.random.Generator:
    """Random numbers of one example in one epoch: part of a counter-based stream that no other example reads."""
    return np.random.Generator(np.random.Philox(key=seed, counter=(0, 0, index, epoch)))


class Masker:
    """Masks the tokens of examples.

    Args:
      tokenizer: of the tokens; None when it is not known, which is an error.
      seq_len: length of an example.
      mask_fraction: share of an example's tokens to predict, special ones aside; at least one token is.
      whole_words: draws words, in random order, and takes each that fits into the number still to be masked, as BERT's
        published code does. Where not even one fits, single tokens are drawn as without whole words.

    Raises:
      DataError: when the vocabulary lacks the special tokens, or marks no words and whole ones are asked for.
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
          `tokens` int32[seq_len] as the model sees them, and with P = `max_masked(seq_len, mask_fraction)`:
          `masked_positions` int32[P], ascending, `targets` int32[P], the tokens there before, and `weights` float32[P],
          1. Where there are fewer than P to predict, or none, position, target and weight of the rest are 0.
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
        """Positions to predict, ascending; as rounding is monotonic, never more than P."""
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
        """What the model sees in place of `targets`."""
        share = rng.random(len(targets))
        drawable = self.vocabulary.drawable
        random = drawable[rng.integers(len(drawable), size=len(targets))]
        kept = np.where(share < _MASKED_SHARE + _RANDOM_SHARE, random, targets)
        return np.where(share < _MASKED_SHARE, self.special.mask, kept)


def _fitting(lengths: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """bool[words]: those that fit into `count` tokens, each after those drawn before it."""
    chosen = np.zeros(len(lengths), bool)
    sizes = lengths.tolist()
    for word in rng.permutation(len(lengths)).tolist():
        if sizes[word] <= count:
            chosen[word] = True
            count -= sizes[word]
            if not count:
                break
    return chosen
