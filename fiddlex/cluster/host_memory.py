"""The memory of a host: where a run can keep optimizer state and activations that do not fit on its devices."""

import dataclasses

from fiddlex.cluster.chips import MOST_GIB
from fiddlex.config import rules


@dataclasses.dataclass(frozen=True)
class HostMemory:
    """The memory of one host, for what its devices keep there; `[host]` of a topology file.

    `[hosts]` is another section (`fiddlex.cluster.slices.Hosts`): it says how the chips of a TPU slice are divided
    among hosts, and nothing about memory.

    Attributes:
      memory_gib: GiB of memory of one host, of which the operating system and the programs' own data take a part.
      devices: number of devices that share the memory.
      bandwidth: bytes/s that each device can read from the memory while it writes as many bytes/s there and all other
        devices of the host do the same.
      source: source of the figures.
      pinned_gib: the most GiB of pinned memory that the platform's allocator gives to one device's arrays unless the
        user changes its settings; 0: the allocator has no limit of its own.
    """

    memory_gib: float
    devices: int
    bandwidth: float
    source: str
    pinned_gib: float = 0.0

    @property
    def bytes_per_device(self) -> int:
        """Bytes of the host's memory for each of its devices, when all have equal shares."""
        return int(self.memory_gib * 2**30 / self.devices)

    @property
    def limit(self) -> int:
        """Bytes that one device's arrays may take: its share of the memory, but no more than the allocator gives."""
        pinned = int(self.pinned_gib * 2**30)
        return min(self.bytes_per_device, pinned) if pinned else self.bytes_per_device

    def validate(self, prefix: str) -> None:
        """Raises ConfigError when a figure is out of its range; `prefix` precedes the names of fields."""
        rules.positive(f"{prefix}memory_gib", self.memory_gib, MOST_GIB)
        rules.at_least(f"{prefix}devices", self.devices, 1)
        rules.positive(f"{prefix}bandwidth", self.bandwidth)
        rules.between(f"{prefix}pinned_gib", self.pinned_gib, 0, MOST_GIB)
