"""Which documents are trained on, which are held out, and which are left out.

Invariant: the three parts are consecutive documents, in the order of the file, and cover it. The edges are those of
megatron.core.datasets.blended_megatron_dataset_builder: cumulative shares times the number of documents, rounded to
even.
"""

import itertools
from collections.abc import Sequence


def split_edges(shares: Sequence[float], count: int) -> list[int]:
    """The first document of each part, and `count` at the end.

    Args:
      shares: shares of the documents that sum to 1, in float64.
      count: number of documents.

    Returns:
      len(shares) + 1 numbers from 0 to `count`, which never fall.
    """
    return [round(edge * float(count)) for edge in itertools.accumulate(shares, initial=0.0)]
