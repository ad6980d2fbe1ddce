"""Kinds of devices, their memory, their speed and what jax calls them; and the memory of the hosts beside them."""

import dataclasses
from collections.abc import Mapping

from fiddlex.config import rules
from fiddlex.config.sections import COMPUTE_DTYPES
from fiddlex.errors import ConfigError

MOST_GIB = 2.0**20  # limit for the memory of a device or a host: a pebibyte, far more than any has


@dataclasses.dataclass(frozen=True)
class Chip:
    """One kind of device: a chip, or an equal part of a chip where jax makes several devices of each chip.

    Attributes:
      name: the maker's name for the chip.
      memory_gib: GiB of memory usable by a program.
      memory_bandwidth: bytes/s between the chip and its memory.
      peak_flops: operations/s of dense matrix products for each compute dtype, at jax's default precision.
      source: source of the chip's figures.
      device_kinds: what `jax.Device.device_kind` may call the chip; empty: not known.
      devices_per_chip: number of devices that jax makes of each chip. All other figures are those of one device.
    """

    name: str
    memory_gib: float
    memory_bandwidth: float
    peak_flops: Mapping[str, float]
    source: str
    device_kinds: tuple[str, ...] = ()
    devices_per_chip: int = 1

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory usable by a program."""
        return int(self.memory_gib * 2**30)

    def peak(self, dtype: str) -> float:
        """Operations/s of dense matrix products in a compute dtype.

        Raises:
          ConfigError: when the chip has no peak for the dtype.
        """
        if dtype not in self.peak_flops:
            raise ConfigError(
                f"{self.name} has no peak_flops for model.dtype={dtype}; it has some for {', '.join(self.peak_flops)}. "
                "Take one of these, or add it to a topology file of your own."
            )
        return self.peak_flops[dtype]

    def validate(self, prefix: str) -> None:
        """Raises ConfigError when a figure is out of its range; `prefix` precedes the names of fields."""
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
    """The memory of one host, for what its devices keep there; `[host]` of a topology file.

    `[hosts]` is another section (`fiddlex.hardware.slices.Hosts`): it says how the chips of a TPU slice are divided
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
