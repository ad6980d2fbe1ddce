"""The links of a topology that the axes of a mesh cross."""

import dataclasses
import math
from collections.abc import Mapping

from fiddlex.config import MeshConfig
from fiddlex.hardware.links import Link, Ring
from fiddlex.hardware.topology import Topology


@dataclasses.dataclass(frozen=True)
class MeshLinks:
    """The links of a mesh."""

    rings: Mapping[str, tuple[Ring, ...]]  # of a group of devices along each axis, by its name
    # from each pipe rank to the next; the last: from the last rank to the first; empty: one rank
    hops: tuple[Link, ...]
    senders: int  # devices that send to the next pipe rank at once

    @classmethod
    def of(cls, topology: Topology, mesh: MeshConfig) -> "MeshLinks":
        """The links of a mesh whose devices are numbered in its `placement_order`."""
        number, sizes = mesh.num_devices, mesh.sizes.items()
        hops = (_slowest_hop(topology, mesh, rank) for rank in range(mesh.pipe))
        return cls(
            {axis: topology.rings(mesh.stride(axis), size, num_devices=number) for axis, size in sizes},
            hops=tuple(hops) if mesh.pipe > 1 else (),
            senders=mesh.stride("pipe"),
        )

    def between(self, first: int, second: int) -> Link:
        """The link over which two different pipe ranks send: the slowest of those between the neighbours on the way."""
        low, high = sorted((first, second))
        around = high - low > 1 and low == 0 and high == len(self.hops) - 1
        return min(self.hops[high:] if around else self.hops[low:high], key=_speed)


def _slowest_hop(topology: Topology, mesh: MeshConfig, rank: int) -> Link:
    """The slowest link, over all replicas, from a pipe rank to the next."""
    step, stride = mesh.stride("pipe"), mesh.stride("data")
    ends = (rank * step, (rank + 1) % mesh.pipe * step)
    sizes = [link.devices for link in topology.links if link.devices]
    # the links that replicas use repeat after so many of them
    turns = max((size // math.gcd(size, stride) for size in sizes), default=1)
    links = (
        topology.link_between(*(end + replica * stride for end in ends)) for replica in range(min(mesh.data, turns))
    )
    return min(links, key=_speed)


def _speed(link: Link) -> float:
    return link.bandwidth / link.paths
