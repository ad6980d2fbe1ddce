import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fiddlex.data import class_shares, majority_share, wilson_interval


@pytest.mark.parametrize(
    ("correct", "total", "low", "high"),
    [
        (8, 10, 0.4902, 0.9433),
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (81, 263, 0.2553, 0.3662),  # Newcombe (1998), table I
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_known_intervals(correct, total, low, high):
    assert wilson_interval(correct, total) == pytest.approx((low, high), abs=6e-5)


@given(st.integers(1, 10**6).flatmap(lambda total: st.tuples(st.integers(0, total), st.just(total))))
def test_the_ends_are_the_shares_that_the_sample_just_fits(drawn):
    correct, total = drawn
    low, high = wilson_interval(correct, total)
    assert 0 <= low <= correct / total <= high <= 1
    for end in {low, high} - {0.0, 1.0}:
        deviations = abs(correct / total - end) / math.sqrt(end * (1 - end) / total)
        assert deviations == pytest.approx(1.959964, rel=1e-4)
    assert wilson_interval(total - correct, total) == pytest.approx((1 - high, 1 - low))


@pytest.mark.parametrize(("correct", "total"), [(0, 0), (-1, 5), (6, 5)])
def test_no_share(correct, total):
    with pytest.raises(ValueError, match=f"{correct} of {total} is no share"):
        wilson_interval(correct, total)


def test_the_most_common_of_what_is_to_be_told():
    first = {"targets": np.array([[1, 3], [3, 0]]), "weights": np.array([[1, 1], [1, 0]], np.float32)}
    second = {"targets": np.array([[1, 1], [0, 0]]), "weights": np.array([[1, 0], [0, 0]], np.float32)}
    assert majority_share([first], 4) == pytest.approx(2 / 3)
    assert majority_share([first, second, second], 4) == pytest.approx(3 / 5)
    assert majority_share([], 4) == 0


def test_shares():
    assert class_shares(np.array([2, 2, 0]), 4).tolist() == pytest.approx([1 / 3, 0, 2 / 3, 0])
