"""Examples for masked language modelling: pieces of documents; several short pieces can share one example.

Invariant: every token of a document is in exactly one example of an epoch. All epochs make their examples of the same
tokens and only draw new masks. Memory holds a few numbers for each document and none for each token.
"""

import numpy as np

from fiddlex.data.masking import Masker, example_rng
from fiddlex.data.staged_examples import StagedExamples
from fiddlex.data.token_kinds import SpecialTokens
from fiddlex.data.token_stream import TokenStream
from fiddlex.data.tokenizers import Tokenizer
from fiddlex.errors import DataError

_AROUND = 2  # tokens around a piece: [CLS] piece [SEP]


class MaskedExamples(StagedExamples):
    """Documents cut into pieces of seq_len − 2 tokens, each as [CLS] piece [SEP].

    The last piece of a document holds the remaining tokens, which may be a single one; no token is left out. With
    `pack`, such short pieces share examples: consecutive pieces, in the order of their documents, join one example as
    long as the next one fits. They are not cut again, and each is its own segment. Without `pack`, each has its own
    padded example. The examples are in the order of their last pieces in the stream.
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
        # Shared example k holds short pieces first[k] to first[k + 1] − 1, and follows all full pieces of their
        # documents.
        self._first = _shared(rest[short] + _AROUND, seq_len) if pack else np.arange(len(short) + 1)
        last_documents = short[self._first[1:] - 1]
        self._shared_indices = self._full_before[last_documents + 1] + np.arange(len(last_documents))

    def __len__(self) -> int:
        return int(self._full_before[-1]) + len(self._shared_indices)

    def read(self, number: int) -> np.ndarray:
        """The tokens of the pieces of example `number`, without special tokens."""
        starts, stops = self._pieces(number)
        lengths = stops - starts
        positions = np.arange(lengths.sum()) + np.repeat(starts - np.cumsum(lengths) + lengths, lengths)
        return np.asarray(self._tokens[positions])

    def prepare(self, sample: np.ndarray, index: int, *, epoch: int) -> dict[str, np.ndarray]:
        """Example `index` with the masks of `epoch`.

        It has the arrays of `Masker.mask`; `segments` int32[seq_len], 1, 2, … for the pieces with their special tokens
        and 0 for padding; `token_types` int32[seq_len], all 0.
        """
        starts, stops = self._pieces(index)
        text = self._masker.vocabulary.checked(sample)
        tokens, segments = _laid_out(text, stops - starts, special=self._masker.special, seq_len=self._seq_len)
        rng = example_rng(self._seed, epoch=epoch, index=index)
        return {
            **self._masker.mask(tokens, rng),
            "segments": segments,
            "token_types": np.zeros(self._seq_len, np.int32),
        }

    def _pieces(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """The first token of each piece of example `index`, and the token after the last of each piece."""
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
    """Puts consecutive pieces into examples, as many as fit into each; returns the first piece of each example.

    `sizes`, int64[pieces], are lengths with special tokens, at most `seq_len`. The result is int64[examples + 1]; its
    last entry is the number of pieces.
    """
    ends = np.append(0, np.cumsum(sizes))
    first = [0]
    while first[-1] < len(sizes):
        first.append(int(np.searchsorted(ends, ends[first[-1]] + seq_len, side="right")) - 1)
    return np.array(first, np.int64)


def _laid_out(
    text: np.ndarray, lengths: np.ndarray, *, special: SpecialTokens, seq_len: int
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and segments of an example, each int32[seq_len]; `lengths` has the length of each piece in `text`."""
    ends = np.cumsum(lengths + _AROUND)
    numbers = np.arange(len(lengths), dtype=np.int32)
    tokens = np.full(seq_len, special.pad, np.int32)
    tokens[np.arange(len(text)) + np.repeat(_AROUND * numbers + 1, lengths)] = text
    tokens[ends - lengths - _AROUND] = special.cls
    tokens[ends - 1] = special.sep
    segments = np.zeros(seq_len, np.int32)
    segments[: ends[-1]] = np.repeat(numbers + 1, lengths + _AROUND)
    return tokens, segments
