"""Statistics by which to judge an accuracy."""

import math
from collections.abc import Iterable, Mapping

import numpy as np

_Z95 = 1.959963984540054  # a standard normal variable lies between -z and z with probability 0.95


def wilson_interval(correct: int, total: int) -> tuple[float, float]:
    """The 95% interval (lower and upper end) of Wilson (1927) for a share, given `correct` successes in `total` trials.

    Unlike the normal approximation, it stays within 0 and 1, and it keeps its coverage for few examples and for shares
    near 0 or 1. Raises ValueError unless 0 ≤ correct ≤ total and total ≥ 1.
    """
    if not 0 <= correct <= total or total < 1:
        raise ValueError(f"{correct} of {total} is no share")
    share, square = correct / total, _Z95**2
    shrink = 1 + square / total
    centre = (share + square / (2 * total)) / shrink
    half = _Z95 / shrink * math.sqrt(share * (1 - share) / total + square / (4 * total**2))
    return (max(centre - half, 0.0) if correct else 0.0), (min(centre + half, 1.0) if correct < total else 1.0)


def majority_share(batches: Iterable[Mapping[str, np.ndarray]], vocab_size: int) -> float:
    """The share of the most common token among all targets, which is the accuracy of always guessing that token.

    Targets, integers in [0, vocab_size), count where their weight is above 0; without any the share is 0.
    """
    counts = np.zeros(vocab_size, np.int64)
    for batch in batches:
        counts += np.bincount(batch["targets"][batch["weights"] > 0], minlength=vocab_size)
    return float(counts.max() / max(counts.sum(), 1))


def class_shares(labels: np.ndarray, num_classes: int) -> np.ndarray:
    """The share of each class, float64[num_classes], among `labels`, integers [examples] of one example or more."""
    return np.bincount(labels, minlength=num_classes) / len(labels)
