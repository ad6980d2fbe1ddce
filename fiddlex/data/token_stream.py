"""The tokens of concatenated documents, and where the documents begin and end.

Invariant: the tokens may be memory-mapped; only `bounds` of a stream with separators reads all of them.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Iterator

import numpy as np

from fiddlex.data.tokenizers import Tokenizer
from fiddlex.terminal.readable import counted, readable_size

_DECODED_AT_ONCE, _READ_AT_ONCE = 2**16, 2**22  # tokens


@dataclasses.dataclass(frozen=True, eq=False)
class TokenStream:
    """Tokens of concatenated documents."""

    tokens: np.ndarray  # unsigned integers, [tokens]; a memory map for token files and for text of many tokens
    num_bytes: int | None = None  # UTF-8 bytes of the text; None for token files, whose text is unknown
    num_documents: int | None = None  # whole documents in the stream; None for a token file or a part of a file
    separator: int | None = None  # the token between documents; None when the vocabulary has none or is unknown
    unit: str = "file"  # what a whole document is called: file or row
    documents: np.ndarray | None = None  # as `bounds` has them, where a file tells them; None: the separators do

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def bytes_per_token(self) -> float | None:
        """The loss per token divided by this is the loss per byte; None for token files and empty streams."""
        return self.num_bytes / len(self.tokens) if self.num_bytes and len(self.tokens) else None

    def first(self, number: int, tokenizer: Tokenizer) -> "TokenStream":
        """The first `number` tokens, with the bytes of the text that `tokenizer` makes of them, without separators.

        For a tokenizer whose tokens do not give back the text as it was, these bytes are an estimate; and so are, by a
        few bytes in each 64 Ki tokens, those of characters of several tokens.
        """
        num_bytes = 0
        for start in range(0, number, _DECODED_AT_ONCE):
            piece = self.tokens[start : min(start + _DECODED_AT_ONCE, number)]
            num_bytes += len(tokenizer.decode(piece[piece != self.separator]).encode("utf-8"))
        return TokenStream(self.tokens[:number], num_bytes, separator=self.separator, unit=self.unit)

    @functools.cached_property
    def bounds(self) -> np.ndarray:
        """The documents, int64[documents, 2]: the first token of each and the one after its last.

        A document is a run of tokens between separators: a file, or a part of a file that contains separators (stories
        in one file, a token file). No document is empty. Without separators the stream is one document. The first
        access reads all tokens once, in chunks, unless `documents` is given.
        """
        if self.documents is not None:
            return self.documents
        found = [np.zeros(0, np.int64)]
        if self.separator is not None:
            for start in range(0, len(self), _READ_AT_ONCE):
                found.append(start + np.flatnonzero(self.tokens[start : start + _READ_AT_ONCE] == self.separator))
        separators = np.concatenate(found)
        bounds = np.stack([np.append(-1, separators) + 1, np.append(separators, len(self))], axis=1)
        return bounds[bounds[:, 0] < bounds[:, 1]]

    def pieces(self) -> Iterator[tuple[int, np.ndarray]]:
        """Up to 64 evenly spaced pieces of 64 Ki tokens, each with the position of its first token."""
        piece, count = 2**16, 64
        for start in range(0, len(self), max(piece, -(-len(self) // count))):
            yield start, self.tokens[start : start + piece]

    def fingerprint(self) -> str:
        """Identifies the stream by its length and a hash of `pieces`."""
        digest = hashlib.sha256(str(len(self)).encode())
        for _, piece in self.pieces():
            digest.update(piece.astype("<u4").tobytes())
        return f"{len(self)}-{digest.hexdigest()[:16]}"

    def describe(self) -> str:
        """The stream's size: '14 files, 391.2 KiB, 412,345 tokens'."""
        parts = []
        if self.num_documents is not None:
            parts.append(counted(self.num_documents, self.unit))
        if self.num_bytes is not None:
            parts.append(readable_size(self.num_bytes))
        return ", ".join([*parts, counted(len(self), "token")])
