"""Token sequences of many lengths: encoded in batches and stored in one array.

They take the bytes of their tokens in the smallest dtype that holds the vocabulary, and eight bytes for each sequence.
"""

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from fiddlex.data.tokenizers import Tokenizer

_ROWS_AT_ONCE = 1024  # limits the memory of waiting texts and of ids that are not yet in the smallest dtype


class Ragged:
    """Sequences of token ids in one flat array: at least one sequence, unsigned integers [tokens], all of one dtype."""

    def __init__(self, sequences: Sequence[np.ndarray]):
        self._flat = np.concatenate(sequences)
        self._offsets = np.cumsum([0, *(len(ids) for ids in sequences)], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        return self._flat[self._offsets[index] : self._offsets[index + 1]]

    @property
    def tokens(self) -> np.ndarray:
        """All sequences concatenated, [tokens]."""
        return self._flat

    def digest(self) -> str:
        """A hash of all sequences, 16 hexadecimal digits."""
        digest = hashlib.sha256(self._offsets.astype("<i8").tobytes())
        digest.update(self._flat.astype("<u4").tobytes())
        return digest.hexdigest()[:16]


def encode_rows(rows: Iterable[Sequence[str]], tokenizer: Tokenizer) -> Iterator[list[np.ndarray]]:
    """Tokens of each text of each row, in the smallest unsigned dtype that holds the vocabulary."""
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    waiting = iter(rows)
    while some := list(itertools.islice(waiting, _ROWS_AT_ONCE)):
        encoded = iter(tokenizer.encode_batch([text for texts in some for text in texts]))
        for texts in some:
            yield [ids.astype(dtype) for ids in itertools.islice(encoded, len(texts))]
