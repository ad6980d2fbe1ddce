"""In which directions the parts of a sequence travel, and into how many blocks they are cut."""

import pytest

from fiddlex.hardware.pieces import num_blocks, num_pieces, num_ways


@pytest.mark.parametrize(
    ("batch", "length", "ways"),
    [
        (1, 512, 2),
        (1, 510, 1),  # a half has fewer than 256 rows
        (3, 172, 2),
        (3, 170, 1),
        (2, 1023, 1),  # an odd length has no halves
    ],
)
def test_halves_travel_both_ways_where_their_products_stay_large(batch: int, length: int, ways: int) -> None:
    assert num_ways(batch, length) == ways


@pytest.mark.parametrize(
    ("batch", "length", "ranks", "blocks"),
    [
        (1, 512, 4, 8),
        (1, 256, 4, 4),  # eight would have fewer than 256 rows
        (1, 510, 4, 6),  # 8 and 7 do not divide 510
        (4, 509, 4, 1),  # a prime
        (1, 32, 2, 1),
        (2, 768, 2, 8),
    ],
)
def test_blocks_are_equal_and_their_products_stay_large(batch: int, length: int, ranks: int, blocks: int) -> None:
    assert num_blocks(batch, length, ranks) == blocks
    assert num_pieces(batch, length, ranks, in_blocks=True) == blocks
    assert num_pieces(batch, length, ranks, in_blocks=False) == ranks * num_ways(batch, length)
