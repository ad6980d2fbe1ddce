"""Where documents begin and end in a stream of tokens, by the separators between them.

Invariant: tokens are read once, in chunks, so that a memory-mapped file is never wholly in memory; only two numbers are
stored for each document.
"""

import numpy as np

_CHUNK_TOKENS = 2**22


def find_documents(tokens: np.ndarray, separator: int | None) -> np.ndarray:
    """The runs of tokens between separators, int64[documents, 2]: the first token of each and the one after its last.

    A separator belongs to no document, and no document is empty. Without one (None), all tokens are one document.
    """
    found = [np.zeros(0, np.int64)]
    if separator is not None:
        for start in range(0, len(tokens), _CHUNK_TOKENS):
            found.append(start + np.flatnonzero(tokens[start : start + _CHUNK_TOKENS] == separator))
    separators = np.concatenate(found)
    bounds = np.stack([np.append(-1, separators) + 1, np.append(separators, len(tokens))], axis=1)
    return bounds[bounds[:, 0] < bounds[:, 1]]
