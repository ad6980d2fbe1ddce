"""In which directions the parts of a sequence travel."""

import pytest

from fiddlex.cluster.rings import num_ways


@pytest.mark.parametrize(
    ("batch", "length", "ranks", "ways"),
    [
        (1, 512, 4, 2),
        (1, 510, 4, 1),  # a half has fewer than 256 rows
        (3, 172, 8, 2),
        (3, 170, 8, 1),
        (2, 1023, 4, 1),  # an odd length has no halves
        (1, 512, 2, 1),
    ],
)
def test_halves_travel_both_ways_where_their_products_stay_large(
    batch: int, length: int, ranks: int, ways: int
) -> None:
    assert num_ways(batch, length, ranks) == ways
