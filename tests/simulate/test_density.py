import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fiddlex.simulate.density import highest, shares


@st.composite
def rows_of_spans(draw):
    """Two kinds of spans of one rank, in turn, that do not overlap, and the time at which the last ends."""
    lengths = draw(st.lists(st.integers(0, 5), min_size=4, max_size=60))
    edges = np.cumsum([0, *lengths]).astype(float)
    spans = np.stack([edges[:-1], edges[1:]], axis=1)[::2]  # every second length is idle
    return spans[::2], spans[1::2], float(edges[-1]) or 1.0


@given(rows_of_spans(), st.integers(1, 50))
def test_a_columns_own_time_gives_its_share(row, num_columns):
    spans, _, end = row
    edges = np.linspace(0, end, num_columns + 1)
    overlap = np.minimum(edges[1:, None], spans[:, 1]) - np.maximum(edges[:-1, None], spans[:, 0])
    exact = np.maximum(overlap, 0).sum(axis=1) / (end / num_columns)
    found = shares(*spans.T, end=end, num_columns=num_columns, width=0.0)
    np.testing.assert_allclose(found, exact, atol=1e-9)


@given(rows_of_spans(), st.integers(1, 50), st.floats(0, 100))
def test_shares_of_spans_that_do_not_overlap_are_no_more_than_the_whole(row, num_columns, width):
    first, second, end = row
    found = [shares(*spans.T, end=end, num_columns=num_columns, width=width) for spans in (first, second)]
    assert (np.asarray(found) >= 0).all()
    assert (np.sum(found, axis=0) <= 1 + 1e-9).all()


def test_shares_of_a_pattern_narrower_than_the_time_around_a_column_have_no_stripes():
    """A forward of 1 and a backward of 2 in turn, in columns that no number of turns fits: a third everywhere."""
    starts = np.arange(0, 3000, 3.0)
    pixels, smooth = (shares(starts, starts + 1, end=3000.0, num_columns=2300, width=width) for width in (0.0, 9.0))
    assert np.ptp(pixels) > 0.3
    np.testing.assert_allclose(smooth[10:-10], 1 / 3, atol=0.01)
    assert shares(starts, starts + 3, end=3000.0, num_columns=2300, width=9.0) == pytest.approx(1.0)


def test_the_highest_amount_in_each_piece_of_time():
    times, amounts = np.asarray([1.0, 2.0, 2.0, 5.0]), np.asarray([3.0, 2.0, 4.0, 0.0])
    assert highest(times, amounts, np.asarray([0.0, 1.5, 2.0, 4.0, 6.0])).tolist() == [3, 3, 4, 4]
    assert highest(times, amounts, np.asarray([0.0, 1.0, 2.0, 5.0, 6.0])).tolist() == [0, 3, 4, 0]
