"""Kinds of devices: their memory, their speed, and what jax calls them."""

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
