"""Kinds of devices, their memory, their speed and what jax calls them; and the memory of the hosts beside them."""

import dataclasses
from collections.abc import Mapping

from fiddlex.config import rules
from fiddlex.config.sections import COMPUTE_DTYPES
from fiddlex.errors import ConfigError

MOST_GIB = 2.0**20  # limit for the memory of a device or a host: a pebibyte, far more than any has


@dataclasses.dataclass(frozen=True)
class Chip:
    """One kind of device: a chip, or an equal part of a chip where jax makes several devices of each chip."""

    name: str  # the maker's
    memory_gib: float  # GiB usable by a program
    memory_bandwidth: float  # bytes/s between the chip and its memory
    # operations/s of dense matrix products by compute dtype, at jax's default precision
    peak_flops: Mapping[str, float]
    source: str  # of the figures
    device_kinds: tuple[str, ...] = ()  # what `jax.Device.device_kind` may call the chip; empty: not known
    # number of devices that jax makes of each chip; all other figures are those of one device
    devices_per_chip: int = 1

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * 2**30)

    def peak(self, dtype: str) -> float:
        """Operations/s of dense matrix products in a compute dtype; ConfigError when the chip has no peak for it."""
        if dtype not in self.peak_flops:
            raise ConfigError(
                f"{self.name} has no peak_flops for model.dtype={dtype}; it has some for {', '.join(self.peak_flops)}. "
                "Take one of these, or add it to a topology file of your own."
            )
        return self.peak_flops[dtype]

    def validate(self, prefix: str) -> None:
        rules.positive(f"{prefix}memory_gib", self.memory_gib, MOST_GIB)
        rules.positive(f"{prefix}memory_bandwidth", self.memory_bandwidth)
        rules.at_least(f"{prefix}devices_per_chip", self.devices_per_chip, 1)
        if not self.peak_flops:
            raise ConfigError(
                f"{prefix}peak_flops is empty: give operations/s for one or more of {', '.join(COMPUTE_DTYPES)}."
            )
        for dtype, peak in self.peak_flops.items():
            if dtype not in COMPUTE_DTYPES:
                raise ConfigError(f"{prefix}peak_flops has no dtype {dtype!r}. {rules.nearest(dtype, COMPUTE_DTYPES)}")
            rules.positive(f"{prefix}peak_flops.{dtype}", peak)


@dataclasses.dataclass(frozen=True)
class HostMemory:
    """The memory of one host, for what its devices keep there: `[host]` of a topology file, not `[hosts]` (`Hosts`)."""

    memory_gib: float  # GiB of one host, of which the operating system and the programs' own data take a part
    devices: int  # number of devices that share the memory
    # bytes/s that each device can read there while it writes as many and all other devices of the host do the same
    bandwidth: float
    source: str  # of the figures
    # most GiB of pinned memory that the allocator gives one device's arrays by default; 0: it has no limit of its own
    pinned_gib: float = 0.0

    @property
    def bytes_per_device(self) -> int:
        return int(self.memory_gib * 2**30 / self.devices)

    @property
    def limit(self) -> int:
        """Bytes that one device's arrays may take: its share of the memory, but no more than the allocator gives."""
        pinned = int(self.pinned_gib * 2**30)
        return min(self.bytes_per_device, pinned) if pinned else self.bytes_per_device

    def validate(self, prefix: str) -> None:
        rules.positive(f"{prefix}memory_gib", self.memory_gib, MOST_GIB)
        rules.at_least(f"{prefix}devices", self.devices, 1)
        rules.positive(f"{prefix}bandwidth", self.bandwidth)
        rules.between(f"{prefix}pinned_gib", self.pinned_gib, 0, MOST_GIB)
