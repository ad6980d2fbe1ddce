"""How long collectives take on the links of a topology.

The model assumes that each collective runs as a ring, whose links are all busy all the time. A ring moves the fewest
bytes possible (Patarasu and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, JPDC 2009), and
NCCL and XLA use rings for large buffers; for small buffers NCCL has trees, which take fewer steps. On n devices a
reduce-scatter takes n − 1 steps, in each of which every device sends an n-th of the buffer to the next; an all-gather
is a reduce-scatter backwards.

A reduce-scatter of a group that spans several links (`Topology.rings`) runs from the innermost ring outwards, as in Cho
et al., BlueConnect (MLSys 2019). A ring of n devices reduces the buffer to an n-th on each device; then n of the next
rings run in parallel, and each moves only that n-th. With V bytes of the whole buffer, and n_k devices at W_k bytes/s
and L_k seconds a step on ring k:

    T = Σ_k [ (n_k − 1)/n_k · V / (n_1 ⋯ n_(k−1)) / W_k + (n_k − 1) · L_k ]

Invariant: nothing overlaps here. The caller decides which communication overlaps with computation.
"""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from fiddlex.hardware.links import Link, Ring


def all_gather_s(num_bytes: float, rings: Iterable[Ring]) -> float:
    """Seconds of an all-gather: T of the module's docstring. Rings begin with the innermost; one device has none."""
    return sum(share.seconds for share in all_gather_shares(num_bytes, rings))


class Share(NamedTuple):
    """What one ring contributes to a collective."""

    link: Link
    bytes: float  # that each device sends over the link
    seconds: float


def all_gather_shares(num_bytes: float, rings: Iterable[Ring]) -> Iterator[Share]:
    """The terms of T in the module's docstring, for an all-gather or a reduce-scatter."""
    part = num_bytes
    for size, link in rings:
        steps = size - 1
        yield Share(link, steps * part / size, steps * (part / size / link.bandwidth + link.latency_s))
        part /= size


def ring_shares(num_bytes: float, rings: Iterable[Ring], *, ways: int) -> Iterator[Share]:
    """What each link contributes while the parts of a buffer travel around one ring of the whole group, in n − 1 hops.

    Devices at the ends of an inner ring send on the outer link what the others send on the inner link. All links work
    at once, so the parts take as long as on the slowest link. A part travels in `ways` directions, 1 or 2, and each
    takes one of a link's paths (`Link.paths`). With two devices both directions are the same, and the parts take all
    paths, as an all-gather does. `num_bytes` are those of the whole buffer, of which each device has a part.
    """
    rings = tuple(rings)
    devices = math.prod(size for size, _ in rings)
    hops, part = devices - 1, num_bytes / devices
    for _, link in rings:
        used = link.paths if devices == 2 else min(ways, link.paths)
        yield Share(link, hops * part, hops * (part * link.paths / used / link.bandwidth + link.latency_s))


def hop_s(num_bytes: float, rings: Iterable[Ring], *, ways: int) -> float:
    """Seconds of one hop of the parts of a buffer around a group; the arguments are those of `ring_shares`."""
    rings = tuple(rings)
    hops = math.prod(size for size, _ in rings) - 1
    return max((share.seconds / hops for share in ring_shares(num_bytes, rings, ways=ways)), default=0.0)


def reduce_scatter_s(num_bytes: float, rings: Iterable[Ring]) -> float:
    """Seconds T of a reduce-scatter, without its additions: memory is several times as fast as any link."""
    return all_gather_s(num_bytes, rings)


def all_reduce_s(num_bytes: float, rings: Iterable[Ring]) -> float:
    """Seconds of an all-reduce: 2T of the module's docstring, for a reduce-scatter and an all-gather."""
    rings = tuple(rings)
    return reduce_scatter_s(num_bytes, rings) + all_gather_s(num_bytes, rings)


def send_s(num_bytes: float, link: Link, *, senders: int = 1) -> float:
    """Seconds of a message from one device to another, as in a pipeline's hop: V · paths / W + L.

    A message takes one of the link's paths, which share the bandwidth. Of the devices that share their bandwidth
    (`Link.pooled`), `senders` send at once.
    """
    more = link.pooled / min(senders, link.pooled)
    return num_bytes * link.paths / (link.bandwidth * more) + link.latency_s
