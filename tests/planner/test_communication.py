import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fiddlex.hardware.links import Link, Ring
from fiddlex.hardware.topology import catalogue, load_topology
from fiddlex.planner.communication import (
    all_gather_s,
    all_gather_shares,
    all_reduce_s,
    hop_s,
    reduce_scatter_s,
    ring_shares,
    send_s,
)

SIZES = st.floats(0, 1e12)
LINKS = st.builds(
    Link, st.just("l"), st.just(0), st.floats(1e6, 1e12), st.floats(0, 1e-3), st.just("s"), st.integers(1, 6)
)
RINGS = st.lists(st.builds(Ring, st.integers(2, 64), LINKS), max_size=3).map(tuple)
COLLECTIVES = pytest.mark.parametrize("seconds", [all_gather_s, reduce_scatter_s, all_reduce_s])


@COLLECTIVES
@given(num_bytes=SIZES)
def test_one_device_takes_no_time(seconds, num_bytes):
    assert seconds(num_bytes, ()) == 0
    assert seconds(num_bytes, load_topology("a100_80").rings(1, 1)) == 0


@COLLECTIVES
@given(less=SIZES, more=SIZES, rings=RINGS)
def test_more_bytes_never_take_less_time(seconds, less, more, rings):
    less, more = sorted((less, more))
    assert 0 <= seconds(less, rings) <= seconds(more, rings)


@given(SIZES, RINGS)
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(num_bytes, rings):
    assert all_reduce_s(num_bytes, iter(rings)) == reduce_scatter_s(num_bytes, rings) + all_gather_s(num_bytes, rings)
    assert reduce_scatter_s(num_bytes, rings) == all_gather_s(num_bytes, rings)


@given(SIZES, st.integers(2, 64), st.integers(2, 64), LINKS)
def test_rings_within_rings_of_the_same_link_move_as_many_bytes_as_one_in_fewer_steps(num_bytes, inner, outer, link):
    one, two = (Ring(inner * outer, link),), (Ring(inner, link), Ring(outer, link))
    steps = (inner * outer - 1) - (inner - 1) - (outer - 1)
    expected = all_gather_s(num_bytes, one) - steps * link.latency_s
    assert all_gather_s(num_bytes, two) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(num_bytes=st.floats(1, 1e10), sizes=st.lists(st.integers(2, 5), min_size=1, max_size=3))
def test_bytes_are_those_of_a_ring_played_step_by_step(num_bytes, sizes):
    # Every device of a grid gathers along its innermost dimension last, piece by piece.
    links = [Link("l", 0, 10.0**power, 0.0, "s") for power in (11, 10, 9)]
    rings = tuple(map(Ring, sizes, links))
    held, seconds = num_bytes / math.prod(sizes), 0.0
    for size, link in reversed(rings):
        arrived = held
        for _ in range(size - 1):
            seconds += held / link.bandwidth
            arrived += held
        held = arrived
    assert held == pytest.approx(num_bytes)
    assert all_gather_s(num_bytes, rings) == pytest.approx(seconds)


@pytest.mark.parametrize("name", catalogue())
@given(num_bytes=SIZES, size=st.integers(1, 8))
def test_a_group_within_a_server_costs_no_more_than_one_across_servers(name, num_bytes, size):
    topology = load_topology(name)
    width = topology.links[0].devices
    size = min(size, width)
    within = topology.rings(1, size, num_devices=size)
    across = topology.rings(width, size)
    assert {ring.link for ring in within} <= {topology.links[0]}
    assert {ring.link for ring in across} <= set(topology.links[1:])
    assert all_reduce_s(num_bytes, within) <= all_reduce_s(num_bytes, across)
    assert send_s(num_bytes, topology.links[0]) <= send_s(num_bytes, topology.links[1])


def test_a_gigabyte_on_sixteen_a100():
    # By hand: 7/8 of 1 GB at 300 GB/s and 7 steps; then 1/2 of an eighth of it at 25 GB/s and one step; both twice.
    expected = 2 * (0.875e9 / 300e9 + 7 * 3.4e-6 + 0.0625e9 / 25e9 + 14e-6)
    assert all_reduce_s(1e9, load_topology("a100_80").rings(1, 16)) == pytest.approx(expected, rel=1e-12)


def test_a_message_takes_one_path():
    ici = load_topology("tpu_v5e").links[0]
    assert send_s(0, ici) == ici.latency_s
    assert send_s(50e9, ici) == pytest.approx(1 + ici.latency_s)  # one of two links of 50 GB/s
    assert send_s(25e9, load_topology("a100_80").links[1]) == pytest.approx(1, rel=1e-4)


@given(st.floats(1, 1e9), st.integers(1, 16), st.integers(1, 16))
def test_who_sends_alone_has_what_all_have_in_common(num_bytes, pooled, senders):
    link = Link("l", 0, 1e9, 0.0, "s", pooled=pooled)
    share = send_s(num_bytes, link, senders=senders) / send_s(num_bytes, link, senders=pooled)
    assert share == pytest.approx(min(senders, pooled) / pooled)


@given(SIZES, st.integers(2, 64), LINKS)
def test_parts_that_take_both_paths_of_a_ring_take_as_long_as_gathered_at_once(num_bytes, size, link):
    rings = (Ring(size, dataclasses.replace(link, paths=2)),)
    (parts,), (whole,) = ring_shares(num_bytes, rings, ways=2), all_gather_shares(num_bytes, rings)
    assert parts == pytest.approx(whole)
    one_way = hop_s(num_bytes, rings, ways=1)
    assert one_way * (size - 1) >= parts.seconds * (1 - 1e-9)
    assert hop_s(num_bytes, rings, ways=2) * (size - 1) == pytest.approx(parts.seconds)
    if size > 2:  # else both ways are one link
        assert one_way == pytest.approx(send_s(num_bytes / size, rings[0].link))


def test_a_hop_waits_for_the_slowest_link_that_the_ring_crosses():
    fast, slow = Link("fast", 4, 1e9, 0.0, "s"), Link("slow", 0, 1e8, 0.5, "s")
    rings = (Ring(4, fast), Ring(2, slow))
    assert hop_s(8e8, rings, ways=2) == pytest.approx(1e8 / 1e8 + 0.5)
    assert [(share.link, share.bytes) for share in ring_shares(8e8, rings, ways=1)] == [(fast, 7e8), (slow, 7e8)]
    assert hop_s(8e8, (), ways=1) == 0
