"""Examples for masked language modelling: pieces of documents, several in one example where they are short.

Invariant: every token of a document is in exactly one example of an epoch, and which tokens make an example is the same
in all; only the masks are drawn anew. What is kept is a few numbers for each document, none for a token.
"""

import numpy as np

from fiddlex.data.corpus import TokenStream
from fiddlex.data.masking import Masker, example_rng
from fiddlex.data.token_kinds import SpecialTokens
from fiddlex.data.tokenizers import Tokenizer
from fiddlex.errors import DataError

_AROUND = 2  # tokens around a piece: [CLS] piece [SEP]


class MaskedExamples:
    """Documents cut into pieces of seq_len − 2 tokens, each as [CLS] piece [SEP].

    The last piece of a document is what is left, down to a single token; nothing is left out. With `pack`, such short
    pieces share examples: next to one another in the order of their documents as long as the next one fits, none cut
    again, each a segment of its own. Examples come in the order in which their last pieces lie in the stream.

    Args:
      stream: the tokens; those between documents (`TokenStream.bounds`) are left out.
      tokenizer: of the tokens; None when it is not known, which is an error.
      seq_len: length of an example, at least 3.
      mask_fraction: share of the tokens to predict.
      whole_words: masks all tokens of a word or none; see `Masker`.
      pack: several short pieces in one example; else one in each, filled up.
      seed: of the masks, at least 0.

    Raises:
      DataError: when the vocabulary lacks the special tokens or whole words, `seq_len` is too small or there are no
        documents.
    """

    def __init__(
        self,
        stream: TokenStream,
        tokenizer: Tokenizer | None,
        *,
        seq_len: int,
        mask_fraction: float,
        whole_words: bool,
        pack: bool,
        seed: int,
    ):
        self._masker = Masker(tokenizer, seq_len=seq_len, mask_fraction=mask_fraction, whole_words=whole_words)
        if seq_len <= _AROUND:
            raise DataError(
                f"model.seq_len={seq_len} must be at least {_AROUND + 1}: an example is a first token, text and a last."
            )
        if not len(stream.bounds):
            raise DataError("there are no documents: all tokens, if any, are separators. Use more data.")
        self._tokens = stream.tokens
        self._seq_len = seq_len
        self._seed = seed
        self._starts, stops = stream.bounds.T
        full, rest = np.divmod(stops - self._starts, seq_len - _AROUND)
        self._full_before = np.append(0, np.cumsum(full))  # full pieces before each document
        short = np.flatnonzero(rest)
        self._short_starts, self._short_stops = (stops - rest)[short], stops[short]
        # Shared example k holds short pieces first[k] to first[k + 1] − 1, and comes after all full pieces of their
        # documents.
        self._first = _shared(rest[short] + _AROUND, seq_len) if pack else np.arange(len(short) + 1)
        last_documents = short[self._first[1:] - 1]
        self._shared_indices = self._full_before[last_documents + 1] + np.arange(len(last_documents))

    def __len__(self) -> int:
        return int(self._full_before[-1]) + len(self._shared_indices)

    def example(self, index: int, *, epoch: int) -> dict[str, np.ndarray]:
        """Example `index` with the masks of `epoch`.

        Returns:
          What `Masker.mask` returns (`tokens`, `masked_positions`, `targets`, `weights`), and `segments`
          int32[seq_len], 1, 2, … for the pieces with the tokens around them and 0 where filled up, and `token_types`
          int32[seq_len], all 0.

        Raises:
          DataError: when a token is outside the tokenizer's vocabulary.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        starts, stops = self._pieces(index)
        lengths = stops - starts
        positions = np.arange(lengths.sum()) + np.repeat(starts - np.cumsum(lengths) + lengths, lengths)
        text = self._masker.vocabulary.checked(self._tokens[positions])
        tokens, segments = _laid_out(text, lengths, special=self._masker.special, seq_len=self._seq_len)
        rng = example_rng(self._seed, epoch=epoch, index=index)
        return {
            **self._masker.mask(tokens, rng),
            "segments": segments,
            "token_types": np.zeros(self._seq_len, np.int32),
        }

    def _pieces(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """First tokens of the pieces of example `index`, and the tokens after their last."""
        shared = int(np.searchsorted(self._shared_indices, index))  # shared examples before this one
        if shared < len(self._shared_indices) and self._shared_indices[shared] == index:
            pieces = slice(self._first[shared], self._first[shared + 1])
            return self._short_starts[pieces], self._short_stops[pieces]
        full = index - shared
        document = np.searchsorted(self._full_before, full, side="right") - 1
        length = self._seq_len - _AROUND
        start = self._starts[document] + (full - self._full_before[document]) * length
        return np.array([start]), np.array([start + length])


def _shared(sizes: np.ndarray, seq_len: int) -> np.ndarray:
    """Puts consecutive pieces into examples, as many as fit into each.

    Args:
      sizes: int64[pieces], each at most `seq_len`.
      seq_len: room of an example.

    Returns:
      int64[examples + 1]: the first piece of each example, and the number of pieces.
    """
    ends = np.append(0, np.cumsum(sizes))
    first = [0]
    while first[-1] < len(sizes):
        first.append(int(np.searchsorted(ends, ends[first[-1]] + seq_len, side="right")) - 1)
    return np.array(first, np.int64)


def _laid_out(
    text: np.ndarray, lengths: np.ndarray, *, special: SpecialTokens, seq_len: int
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and segments of an example, each int32[seq_len]; `lengths` are those of the pieces in `text`."""
    ends = np.cumsum(lengths + _AROUND)
    numbers = np.arange(len(lengths), dtype=np.int32)
    tokens = np.full(seq_len, special.pad, np.int32)
    tokens[np.arange(len(text)) + np.repeat(_AROUND * numbers + 1, lengths)] = text
    tokens[ends - lengths - _AROUND] = special.cls
    tokens[ends - 1] = special.sep
    segments = np.zeros(seq_len, np.int32)
    segments[: ends[-1]] = np.repeat(numbers + 1, lengths + _AROUND)
    return tokens, segments
