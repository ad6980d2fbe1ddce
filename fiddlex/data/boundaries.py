"""Where documents begin and end in a stream of tokens, by the separators between them.

Invariant: tokens are read once, in chunks, so that a memory-mapped file is never wholly in memory; only two numbers are
stored for each document.
"""

import numpy as np

_CHUNK_TOKENS = 2**22


def find_documents(tokens: np.ndarray, separator: int | None) -> np.ndarray:
    """The runs of `tokens` between separators.

    Args:
      tokens: integers, [tokens]; may be memory-mapped.
      separator: the token between documents, which belongs to no document; None: all tokens are one document.

    Returns:
      int64[documents, 2]: the first token of each document and the one after its last. No document is empty.
    """
    found = [np.zeros(0, np.int64)]
    if separator is not None:
        for start in range(0, len(tokens), _CHUNK_TOKENS):
            found.append(start + np.flatnonzero(tokens[start : start + _CHUNK_TOKENS] == separator))
    separators = np.concatenate(found)
    bounds = np.stack([np.append(-1, separators) + 1, np.append(separators, len(tokens))], axis=1)
    return bounds[bounds[:, 0] < bounds[:, 1]]
