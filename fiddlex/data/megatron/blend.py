"""Which source of a blend gives the next example, so that the sources' shares hold at every step.

Megatron's rule (`build_blending_indices` in megatron/core/datasets/helpers.cpp): example k comes from the source whose
number of examples so far lags most behind its weight times k; of several such sources the first. Here the lags are
integers. Megatron computes them in float64, where rounding decides between sources that lag equally.

Invariant: the place of example k is a function of the weights and k. The rule repeats itself: with weights p₁/q, p₂/q,
…, the first q examples have pᵢ of source i, and no source lags after them. So the places of 2q examples suffice for all
others. They are not those of q examples, because Megatron takes max(k, 1) for k, which matters in the first q alone.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

LARGEST_PERIOD = 2**18  # examples; the shares of finer weights are rounded to multiples of its inverse


class Place(NamedTuple):
    """Which source gives an example, and how many examples the source has given before it."""

    source: int
    nth: int


class Blend:
    """The order of a blend; of the weights, which are above 0, only the ratios count."""

    def __init__(self, weights: Sequence[Fraction]):
        self._per_period = period_shares(weights)
        self._period = sum(self._per_period)
        self._sources, self._nths = _first_places(self._per_period)

    @property
    def shares(self) -> tuple[float, ...]:
        return tuple(number / self._period for number in self._per_period)

    def place(self, k: int) -> Place:
        """The place of example `k`, counted from 0."""
        periods = max(k // self._period - 1, 0)
        row = k - periods * self._period
        source = int(self._sources[row])
        return Place(source, int(self._nths[row]) + periods * self._per_period[source])


def period_shares(weights: Sequence[Fraction]) -> list[int]:
    """The examples of each source in a period, at least 1; in their ratio as the weights, or the nearest to it."""
    total = sum(weights)
    period = math.lcm(*((weight / total).denominator for weight in weights))
    if period <= LARGEST_PERIOD:
        return [int(weight / total * period) for weight in weights]
    return [max(round(weight / total * LARGEST_PERIOD), 1) for weight in weights]


def _first_places(per_period: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """The source of each example of two periods, and the examples that the source has given before."""
    period = sum(per_period)
    weights, counts = np.array(per_period), np.zeros(len(per_period), np.int64)
    places = np.zeros((2 * period, 2), np.int64)
    for k in range(2 * period):
        source = int(np.argmax(weights * max(k, 1) - counts * period))
        places[k] = source, counts[source]
        counts[source] += 1
    return places[:, 0], places[:, 1]


def interleaved(sizes: Sequence[int]) -> np.ndarray:
    """All examples of several sources, each once, so that any first part of them has a share of every source.

    Returns int64[sum of sizes, 2]: the source of each example, and its number in the source.
    """
    places = [np.stack([np.full(size, source), np.arange(size)], axis=1) for source, size in enumerate(sizes)]
    moments = np.concatenate([(np.arange(size) + 0.5) / size for size in sizes])
    return np.concatenate(places)[np.argsort(moments, kind="stable")]
