"""What columns of a picture show where time is too long to show each moment: shares of spans, and highest amounts.

Boxes narrower than a dot of the picture would make stripes that are not there (moiré). The share of the time that boxes
of one colour take around each column changes smoothly instead. Invariant: shares of spans that do not overlap add up to
at most one in every column.
"""

from collections.abc import Sequence

import numpy as np


def shares(starts: Sequence[float], ends: Sequence[float], *, end: float, num_columns: int, width: float) -> np.ndarray:
    """Returns the share of the time around each column that the spans take, float [column].

    The spans are in order and do not overlap. The columns divide the time from 0 to `end` equally. Time counts up to
    `width` from a column, the further away the less (a triangle); if `width` is less than a column, only the column's
    own time counts. Time outside of 0 to `end` does not count.
    """
    times = np.stack([starts, ends], axis=1).ravel()
    lengths = np.subtract(ends, starts)
    taken = np.stack([np.cumsum(lengths) - lengths, np.cumsum(lengths)], axis=1).ravel()
    column = end / num_columns
    own = np.diff(np.interp(np.linspace(0, end, num_columns + 1), times, taken)) / column
    reach = min(int(width / column), num_columns - 1)
    weights = 1 + reach - np.abs(np.arange(-reach, reach + 1))
    inside = slice(reach, reach + num_columns)
    total, counted = (np.convolve(row, weights)[inside] for row in (own, np.ones(num_columns)))
    return np.clip(total / counted, 0, 1)


def highest(times: np.ndarray, amounts: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Returns the largest amount in each piece of time, float [piece], where the amount is 0 before the first time.

    The amounts hold from `times` on, which are in order and within the first and last of `edges`; there is one edge
    more than there are pieces.
    """
    at_edges = np.concatenate([[0.0], amounts])[np.searchsorted(times, edges[:-1], side="right")]
    pieces = np.searchsorted(edges[1:-1], times, side="right")
    np.maximum.at(at_edges, pieces, amounts)
    return at_edges
