"""Which documents are trained on, which are held out, and which are left out.

Invariant: the three parts are consecutive documents, in the order of the file, and cover it. The edges are those of
megatron.core.datasets.blended_megatron_dataset_builder: cumulative shares times the number of documents, rounded to
even.
"""

import itertools
from collections.abc import Sequence


def split_edges(shares: Sequence[float], count: int) -> list[int]:
    """The first document of each part, and `count` at the end; `shares` sum to 1, and the edges never fall."""
    return [round(edge * float(count)) for edge in itertools.accumulate(shares, initial=0.0)]
