"""What rings expose, against pieces and hops played one after the other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fiddlex.planner.layer_exchange import RingTimes, exchange_of_rings

SECONDS = st.floats(0, 10)


def played(pieces: int, piece: float, hop: float) -> float:
    """Seconds of a ring whose every hop runs beside a piece, and whose last piece needs the last hop."""
    seconds = 0.0
    for _ in range(pieces - 1):
        seconds += max(piece, hop)
    return seconds + piece


@given(st.integers(1, 16), SECONDS, SECONDS, SECONDS, st.booleans())
def test_rings_take_as_long_as_played(ranks, forward, backward, hop, gathers):
    found = exchange_of_rings([RingTimes(gathers, forward * ranks, backward * ranks)], ranks=ranks, hop=hop)
    assert ranks * forward + found.forward == pytest.approx(played(ranks, forward, hop))
    hops = 2 * hop if gathers else hop  # the input is gathered again on the same links
    assert ranks * backward + found.backward_input == pytest.approx(played(ranks, backward, hops))


def test_rings_of_a_layer_add_up():
    rings = [RingTimes(True, 4.0, 8.0), RingTimes(False, 0.0, 2.0)]
    one, other = (exchange_of_rings([ring], ranks=4, hop=1.5) for ring in rings)
    assert one == (1.5, 3.0)
    assert other == (4.5, 3.0)
    assert exchange_of_rings(rings, ranks=4, hop=1.5) == (6.0, 6.0)
