"""What rings and blocks expose, against pieces and exchanges played one after the other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fiddlex.planner.layer_exchange import ProductTimes, exchange_of_blocks, exchange_of_rings

SECONDS = st.floats(0, 10)


def played(pieces: int, piece: float, hop: float) -> float:
    """Seconds of a ring whose every hop runs beside a piece, and whose last piece needs the last hop."""
    seconds = 0.0
    for _ in range(pieces - 1):
        seconds += max(piece, hop)
    return seconds + piece


@given(st.integers(1, 16), SECONDS, SECONDS, SECONDS, st.booleans())
def test_rings_take_as_long_as_played(ranks, forward, backward, hop, gathers):
    found = exchange_of_rings([ProductTimes(gathers, forward * ranks, backward * ranks)], ranks=ranks, hop=hop)
    assert ranks * forward + found.forward == pytest.approx(played(ranks, forward, hop))
    hops = 2 * hop if gathers else hop  # the input is gathered again on the same links
    assert ranks * backward + found.backward_input == pytest.approx(played(ranks, backward, hops))


def test_rings_of_a_layer_add_up():
    rings = [ProductTimes(True, 4.0, 8.0), ProductTimes(False, 0.0, 2.0)]
    one, other = (exchange_of_rings([ring], ranks=4, hop=1.5) for ring in rings)
    assert one == (1.5, 3.0)
    assert other == (4.5, 3.0)
    assert exchange_of_rings(rings, ranks=4, hop=1.5) == (6.0, 6.0)


def played_in_blocks(number: int, piece: float, block: float, *, first: float = 0.0) -> float:
    """Seconds of products of which each waits for its own gather, while the links carry one gather at a time."""
    arrived = worked = first
    for _ in range(number):
        arrived += block
        worked = max(worked, arrived) + piece
    return worked


@given(st.integers(1, 8), SECONDS, SECONDS, SECONDS)
def test_blocks_take_as_long_as_played(number, forward, backward, block):
    """What gathers is what sums, played backwards."""
    for gathers in (False, True):
        times = [ProductTimes(gathers, forward * number, backward * number)]
        found = exchange_of_blocks(times, number=number, block=block, whole=0.0)
        assert number * forward + found.forward == pytest.approx(played_in_blocks(number, forward, block))
    found = exchange_of_blocks([ProductTimes(False, 0.0, backward * number)], number=number, block=block, whole=9.0)
    assert number * backward + found.backward_input == pytest.approx(played_in_blocks(number, backward, block))


def test_an_input_gathered_again_shares_the_links_with_the_sums():
    products = [ProductTimes(True, 0.0, 8.0)]
    assert exchange_of_blocks(products, number=4, block=1.0, whole=4.0).backward_input == 1.0  # 4 + 3 beside 8
    assert exchange_of_blocks(products, number=4, block=2.0, whole=8.0).backward_input == 2.0 + 6.0
