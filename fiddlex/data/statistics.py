"""Statistics by which to judge an accuracy."""

import math
from collections.abc import Iterable, Mapping

import numpy as np

_Z95 = 1.959963984540054  # a standard normal variable lies between -z and z with probability 0.95


def wilson_interval(correct: int, total: int) -> tuple[float, float]:
    """The 95% interval of Wilson (1927) for a share, given `correct` successes in a sample of `total`.

    Unlike the normal approximation, it stays within 0 and 1, and it keeps its coverage for few examples and for shares
    near 0 or 1.

    Args:
      correct: from 0 to `total`.
      total: at least 1.

    Returns:
      The lower and the upper end.

    Raises:
      ValueError: when an argument is out of its range.
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

    Args:
      batches: batches with `targets`, integers in [0, vocab_size), and `weights`, 0 where there is no target.
      vocab_size: number of tokens.

    Returns:
      A share from 0 to 1; 0 when there are no targets.
    """
    counts = np.zeros(vocab_size, np.int64)
    for batch in batches:
        counts += np.bincount(batch["targets"][batch["weights"] > 0], minlength=vocab_size)
    return float(counts.max() / max(counts.sum(), 1))


def class_shares(labels: np.ndarray, num_classes: int) -> np.ndarray:
    """The share of each class among `labels`; the largest is the accuracy of always guessing the most common class.

    Args:
      labels: integers in [0, num_classes), [examples]; at least one.
      num_classes: number of classes.

    Returns:
      float64[num_classes], which sums to 1.
    """
    return np.bincount(labels, minlength=num_classes) / len(labels)
