from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fiddlex.data.megatron.blend import LARGEST_PERIOD, Blend, interleaved, period_shares

WEIGHTS = st.lists(st.integers(1, 12), min_size=1, max_size=5)


def greedy(weights, count):
    """Megatron's rule as it is told: the source that lags most, in exact arithmetic."""
    total, given_so_far, places = sum(weights), [0] * len(weights), []
    for k in range(count):
        lags = [Fraction(weight, total) * max(k, 1) - n for weight, n in zip(weights, given_so_far, strict=True)]
        source = lags.index(max(lags))
        places.append((source, given_so_far[source]))
        given_so_far[source] += 1
    return places


@given(weights=WEIGHTS)
def test_the_source_that_lags_most_is_next(weights):
    count = 5 * sum(weights)
    blend = Blend([Fraction(weight, 7) for weight in weights])
    assert [blend.place(k) for k in range(count)] == greedy(weights, count)


@given(weights=WEIGHTS, k=st.integers(0, 10**12))
def test_shares_hold_at_every_step(weights, k):
    place, total = Blend([Fraction(weight) for weight in weights]).place(k), sum(weights)
    assert abs(place.nth - weights[place.source] * k / total) <= len(weights)


def test_the_order_of_two_sources_by_hand():
    blend = Blend([Fraction("0.7"), Fraction("0.3")])
    assert "".join("ab"[blend.place(k).source] for k in range(20)) == "abaabaabaaabaabaabaa"
    assert [blend.place(k) for k in range(6)] == [(0, 0), (1, 0), (0, 1), (0, 2), (1, 1), (0, 3)]
    assert [blend.place(10**10 + k) for k in (0, 1)] == [(0, 7 * 10**9), (1, 3 * 10**9)]


def test_weights_too_fine_are_rounded_and_none_is_lost():
    weights = [Fraction(123_456_789), Fraction(987_654_321), Fraction(5)]
    shares = period_shares(weights)
    assert shares[2] == 1
    assert np.array(shares) / LARGEST_PERIOD == pytest.approx([float(w / sum(weights)) for w in weights], abs=5e-6)
    assert period_shares([Fraction("0.25"), Fraction("0.75")]) == [1, 3]


@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any))
def test_interleaving_has_each_example_once_and_every_source_early(sizes):
    places = interleaved(sizes)
    assert sorted(map(tuple, places.tolist())) == [(s, n) for s, size in enumerate(sizes) for n in range(size)]
    for k in range(len(places)):
        counts = np.bincount(places[:k, 0], minlength=len(sizes))
        assert np.abs(counts - np.array(sizes) * k / sum(sizes)).max() <= len(sizes)
