"""The links between the devices of a topology."""

import dataclasses
from typing import NamedTuple

from fiddlex.config import rules


@dataclasses.dataclass(frozen=True)
class Link:
    """The connection between the devices of a group."""

    name: str  # of the link's technology
    devices: int  # number of devices in a group that the link joins; 0: any number
    # bytes/s that each device can send while it receives as much and all others of the group do the same
    bandwidth: float
    latency_s: float  # seconds that a message takes from start to arrival, in addition to the time for its bytes
    source: str  # of the figures
    paths: int = 1  # number of paths that share the bandwidth; a message to one other device uses one, a ring uses all
    pooled: int = 1  # number of devices that share their sending bandwidth; when fewer of them send, each gets more

    def validate(self, prefix: str) -> None:
        rules.at_least(f"{prefix}devices", self.devices, 0)
        rules.positive(f"{prefix}bandwidth", self.bandwidth)
        rules.at_least(f"{prefix}latency_s", self.latency_s, 0)
        rules.at_least(f"{prefix}paths", self.paths, 1)
        rules.at_least(f"{prefix}pooled", self.pooled, 1)


class Ring(NamedTuple):
    """Devices of a group that exchange over one link: their number, and the link."""

    size: int
    link: Link
