"""Chips, the links between them, and their prices: clusters as data.

A topology is a TOML file. The catalogue's files are in `fiddlex/hardware/topologies`, and a program refers to each by
its name. Your own file has the same form; refer to it by its path, which ends in `.toml`:

    description = "NVIDIA A100 80 GB SXM, eight to a server, InfiniBand between servers"

    [chip]
    name = "A100-SXM4-80GB"
    device_kinds = ["NVIDIA A100-SXM4-80GB"]  # optional; what jax calls the chip
    devices_per_chip = 1             # optional; number of devices that jax makes of each chip (TPU7x: 2)
    memory_gib = 79.25               # memory of a device usable by a program
    memory_bandwidth = 2.039e12      # bytes/s between the chip and its memory
    peak_flops = {bfloat16 = 312e12, float16 = 312e12, float32 = 156e12}  # operations/s of dense matrix products
    source = "where we found the figures of [chip]"

    [[links]]                        # one section for each link, from the innermost outwards
    name = "NVLink 3"
    devices = 8                      # number of devices in a group that the link joins; 0 (last link only): any number
    bandwidth = 300e9                # bytes/s that each device sends while all of the group send and receive
    paths = 1                        # optional; number of paths that share the bandwidth; a message uses one
    latency_s = 3.4e-6               # seconds that a message takes in addition to the time for its bytes
    source = "where we found the figures of this link"

    [[links]]
    …

    [host]                           # optional; the memory of a host, for what its devices keep there (`HostMemory`)
    memory_gib = 2048                # memory of one host
    devices = 8                      # number of devices that share it
    bandwidth = 9.3e9                # bytes/s that each device reads while it writes as many and all others do the same
    pinned_gib = 64                  # optional; most pinned memory that one device gets by default; 0: any amount
    source = "where we found the figures of [host]"

    [price]                          # optional
    usd_per_device_hour = 3.43
    date = 2026-11-22                # day on which we read the price
    source = "where we found the price"

    [compiler]                       # optional; the chips' name in fiddlex compile --topology
    platform = "gpu"                 # "gpu" or "tpu"
    name = "a100"                    # the ahead-of-time compiler's name for the kind of chip
    torus = 0                        # number of dimensions of a TPU's torus: 2 or 3; optional for GPUs

    [compiler.gpu]                   # optional; the compiler's description of the GPU (`GpuTarget`)
    …

    [hosts]                          # optional; how the chips of a slice of TPUs are divided among hosts (`Hosts`)
    …

The devices of a GPU's host are those that share [host]; without [host], those of a group of the first link.

Devices are numbered as in the mesh: `tensor` varies fastest, `mesh.outermost` slowest. Each group of a link is a run of
consecutive devices. On TPUs each mesh axis is assumed to be a ring along one torus dimension, so `bandwidth` counts
that dimension's two links, and `paths` is 2. Invariant: every figure has a source, and nothing in this module depends
on a model.

    python -m fiddlex.hardware.topology       # prints the catalogue
"""

import dataclasses
import datetime
import functools
import importlib.resources
import math
import os
import pathlib
import tomllib
from typing import Any

from fiddlex.config import rules
from fiddlex.config.records import from_mapping
from fiddlex.config.sections import COMPUTE_DTYPES
from fiddlex.errors import ConfigError
from fiddlex.hardware.chips import Chip, HostMemory
from fiddlex.hardware.gpu_targets import GpuTarget
from fiddlex.hardware.links import Link, Ring
from fiddlex.hardware.slices import Hosts, slice_shape
from fiddlex.terminal.readable import counted

_CATALOGUE = importlib.resources.files("fiddlex.hardware") / "topologies"
# Number of devices that jax makes of each chip, by libtpu's names for the chips.
LIBTPU_DEVICES_PER_CHIP = {"v2": 2, "v3": 2, "v4": 1, "v5e": 1, "v5p": 1, "v6e": 1, "tpu7x": 2}


@dataclasses.dataclass(frozen=True)
class Price:
    """The on-demand list price of renting a device."""

    usd_per_device_hour: float
    date: datetime.date  # day on which the price was read
    source: str


@dataclasses.dataclass(frozen=True)
class Compiler:
    """The ahead-of-time compiler's name for the chips (`fiddlex.cluster.mesh.make_topology_mesh`)."""

    platform: str  # of the chips, `gpu` or `tpu`
    name: str  # the compiler's, for the kind of chip
    torus: int = 0  # number of dimensions of the torus that TPUs form; 0 for GPUs
    gpu: GpuTarget | None = None  # description of the GPU; None: the one that the catalogue has under `name`

    def validate(self, prefix: str) -> None:
        rules.choice(f"{prefix}platform", self.platform, ("gpu", "tpu"))
        torus = {"gpu": (0,), "tpu": (2, 3)}[self.platform]
        if self.torus not in torus:
            raise ConfigError(
                f"{prefix}torus={self.torus} with platform={self.platform!r}: it must be "
                f"{' or '.join(map(str, torus))}, the dimensions of the torus that its chips form."
            )
        if self.gpu:
            self.gpu.validate(f"{prefix}gpu.")

    @property
    def kind(self) -> str:
        """The first part of the names of topologies to compile for, such as `tpu:v5e`."""
        return f"{self.platform}:{self.name}"

    @property
    def target(self) -> GpuTarget | None:
        """The compiler's description of the GPU; None where neither the file nor the catalogue has one."""
        return self.gpu or gpu_targets().get(self.name)


@dataclasses.dataclass(frozen=True)
class Topology:
    """A kind of cluster, of any number of devices."""

    name: str  # in the catalogue, or the path of the file
    description: str  # for people to read
    chip: Chip  # the kind of device, the same throughout the cluster
    links: tuple[Link, ...]  # between devices, from the innermost outwards
    price: Price | None = None  # of a device; None: unknown
    compiler: Compiler | None = None  # None: programs cannot be compiled for this cluster
    hosts: Hosts | None = None  # of a slice of TPUs; None for GPUs, whose hosts are the groups of the first link
    host: HostMemory | None = None  # the memory of one host; None: unknown

    def rings(self, stride: int, size: int, *, num_devices: int = 0) -> tuple[Ring, ...]:
        """The rings over which a group of `size` devices, `stride` device numbers apart, exchanges, innermost first.

        The product of the rings' sizes is `size`. Where groups do not fit evenly into those of a link (three devices on
        servers of eight), some cross the outer links more than others; the rings are those of the groups that cross
        them most. Where one group of a link holds all `num_devices` of the mesh, no exchange uses a link further out; 0
        assumes that only a group of the last link holds them all.

        Raises:
          ConfigError: when no link joins so many devices.
        """
        most = max(stride * size, num_devices)
        self._check_joined(most, f"{most} devices")
        rings, joined = [], 1  # joined: how many of the devices the rings so far join
        for link in self.links:
            if link is self.links[-1] or 0 < num_devices <= link.devices:
                inside = size
            elif link.devices % stride:
                inside = joined
            else:
                inside = math.gcd(size, link.devices // stride)
            if inside > joined:
                rings.append(Ring(inside // joined, link))
                joined = inside
        return tuple(rings)

    def link_between(self, first: int, second: int) -> Link:
        """The innermost link that joins two devices, by their numbers; ConfigError when none does."""
        self._check_joined(max(first, second) + 1, f"devices {first} and {second}")
        return next(link for link in self.links if not link.devices or first // link.devices == second // link.devices)

    def _check_joined(self, num_devices: int, what: str) -> None:
        widest = self.links[-1]
        if widest.devices and num_devices > widest.devices:
            raise ConfigError(
                f"topology {self.name}: no link joins {what}; the widest, {widest.name}, joins {widest.devices}. "
                "Take fewer devices, or add a link to a file of your own."
            )

    @property
    def host_memory(self) -> HostMemory:
        """The memory of the hosts; ConfigError when the topology has no [host]."""
        if self.host is None:
            raise ConfigError(
                f"topology {self.name} has no [host], so that nothing is known of the memory of its hosts. Add one, or "
                "keep everything on the devices (optimizer.offload=false)."
            )
        return self.host

    @property
    def platform(self) -> str:
        """`tpu`, or `gpu` for NVIDIA's; empty for other chips. Without [compiler], what jax calls the chip tells."""
        if self.compiler:
            return self.compiler.platform
        return "gpu" if any(kind.startswith(("NVIDIA ", "Tesla ")) for kind in self.chip.device_kinds) else ""

    @property
    def between_chips(self) -> Link:
        """The innermost link between chips: that of a TPU slice, or of the GPUs that are joined closest."""
        return next((link for link in self.links if link.devices != self.chip.devices_per_chip), self.links[-1])

    @property
    def gpus_per_host(self) -> int:
        """Number of devices of a host of GPUs; 0: not known."""
        return self.host.devices if self.host else self.links[0].devices

    def slice_shape(self, num_devices: int) -> tuple[int, ...]:
        """The edges, in chips, of the most cubic slice of `num_devices` devices; empty where there is no such slice."""
        assert self.compiler
        largest, per_chip = self.between_chips.devices or num_devices, self.chip.devices_per_chip
        if num_devices > largest or num_devices % per_chip:
            return ()
        return slice_shape(self.compiler.torus, num_devices // per_chip)

    def compile_name(self, num_devices: int) -> str:
        """The ahead-of-time compiler's name for `num_devices` of these devices; ConfigError when there is none.

        GPUs must be whole hosts or a part of one host. TPUs form the most cubic slice (`fiddlex.hardware.slices`), or
        several slices of as many devices as the innermost link between chips joins.
        """
        if self.compiler is None:
            raise ConfigError(
                f"topology {self.name} has no [compiler], so that nothing can be compiled for it. If jax has a "
                "compiler for these devices, add one to a file of your own."
            )
        num_slices = 1
        shape: tuple[int, ...] = ()
        if self.compiler.platform == "gpu":
            per_host = min(num_devices, self.gpus_per_host or num_devices)
            if num_devices % per_host == 0:
                shape = num_devices // per_host, per_host
        else:
            largest = self.between_chips.devices or num_devices
            num_slices = num_devices // largest if num_devices % largest == 0 else 1
            shape = self.slice_shape(num_devices // num_slices)
        if not shape:
            raise ConfigError(
                f"{num_devices} devices of {self.name} are no cluster that can be compiled for. Take another number of "
                "them: of TPUs a whole slice or several of the largest, of GPUs a part of a host or whole ones."
            )
        slices = f":{num_slices}" if num_slices > 1 else ""
        return f"{self.compiler.platform}:{self.compiler.name}:{'x'.join(map(str, shape))}{slices}"

    def validate(self) -> "Topology":
        """Checks every figure, and that the links' groups nest; returns the topology, or raises ConfigError."""
        prefix = f"topology {self.name}: "
        self.chip.validate(f"{prefix}chip.")
        if not self.links:
            raise ConfigError(f"{prefix}links is empty: give at least one, from the innermost outwards.")
        for index, link in enumerate(self.links):
            link.validate(f"{prefix}links[{index}].")
        inner = 1
        for index, link in enumerate(self.links):
            outermost = link is self.links[-1]
            if not (outermost and link.devices == 0) and (link.devices <= inner or link.devices % inner):
                least = "at least 2" if index == 0 else f"a larger multiple of the {inner} of links[{index - 1}]"
                raise ConfigError(
                    f"{prefix}links[{index}].devices={link.devices} must be {least}: links go from the innermost "
                    "outwards, and each joins whole groups of the one before it. Only the last may have 0, any number."
                )
            inner = link.devices
        if self.price:
            rules.positive(f"{prefix}price.usd_per_device_hour", self.price.usd_per_device_hour)
        if self.compiler:
            self.compiler.validate(f"{prefix}compiler.")
            per_chip = self.chip.devices_per_chip
            right = LIBTPU_DEVICES_PER_CHIP.get(self.compiler.name, per_chip)
            if self.compiler.platform == "tpu" and per_chip != right:
                raise ConfigError(
                    f"{prefix}chip.devices_per_chip={per_chip} with compiler.name={self.compiler.name!r}: jax makes "
                    f"{counted(right, 'device')} of each such chip. Set it to {right}; all other figures of [chip], "
                    "[[links]] and [host] are those of devices."
                )
        if self.hosts:
            self.hosts.validate(f"{prefix}hosts.")
        if self.host:
            self.host.validate(f"{prefix}host.")
        return self


def catalogue() -> tuple[str, ...]:
    """The names of the topologies that come with fiddlex, sorted."""
    files = (file.name for file in _CATALOGUE.iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in files if name.endswith(".toml")))


def load_topology(name_or_path: str) -> Topology:
    """Reads and checks a topology: a name in the catalogue (`a100_80`), or the path of a file, which ends in `.toml`.

    Raises:
      ConfigError: when no such topology exists, or its file cannot be read, is not TOML, or breaks a rule.
    """
    path: Any = pathlib.Path(os.path.expanduser(name_or_path))
    if path.suffix != ".toml":
        if name_or_path not in catalogue():
            raise ConfigError(
                f"topology {name_or_path!r} is not in the catalogue. {rules.nearest(name_or_path, catalogue())} "
                "A file of your own goes by its path, which ends in .toml."
            )
        path = _CATALOGUE / f"{name_or_path}.toml"
    where = f"topology {name_or_path}"
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8").removeprefix("\ufeff"))  # some editors' byte order mark
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror}. Give the path of a TOML file.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} is not UTF-8 at byte {error.start}: save it as UTF-8, which TOML is.") from error
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, which gives the line; or a number of 5000 digits
        raise ConfigError(f"{where} is not TOML: {error}.") from error
    return from_mapping(Topology, values, f"{where}: ", name=name_or_path).validate()


@functools.cache
def gpu_targets() -> dict[str, GpuTarget]:
    """The compiler's descriptions of the catalogue's GPUs, by the compiler's names for them."""
    compilers = (load_topology(name).compiler for name in catalogue())
    return {each.name: each.gpu for each in compilers if each and each.gpu}


def table() -> str:
    """The catalogue as a Markdown table."""
    columns = ["topology", "memory, GiB", "memory, TB/s", *(f"TFLOP/s, {dtype}" for dtype in COMPUTE_DTYPES)]
    columns += ["links: so many devices, each at GB/s", "host memory per device, GiB", "host memory, GB/s each way"]
    columns += ["USD/h", "on", "devices per chip", "compiled as"]
    numbers = ["---:"] * (2 + len(COMPUTE_DTYPES))
    rows = [columns, ["---", *numbers, "---", "---:", "---:", "---:", "---", "---:", "---"]]
    for topology in map(load_topology, catalogue()):
        chip, price, host = topology.chip, topology.price, topology.host
        peaks = [f"{chip.peak_flops[dtype] / 1e12:g}" if dtype in chip.peak_flops else "" for dtype in COMPUTE_DTYPES]
        links = [f"{link.devices or 'any'} at {link.bandwidth / 1e9:.4g} ({link.name})" for link in topology.links]
        cost = [f"{price.usd_per_device_hour:.2f}", str(price.date)] if price else ["", ""]
        memory = [f"{chip.memory_gib:g}", f"{chip.memory_bandwidth / 1e12:.4g}"]
        off = [f"{host.bytes_per_device / 2**30:g}", f"{host.bandwidth / 1e9:.4g}"] if host else ["", ""]
        compiled = [str(chip.devices_per_chip), f"`{topology.compiler.kind}`" if topology.compiler else "cannot be"]
        rows.append([f"`{topology.name}`", *memory, *peaks, ", ".join(links), *off, *cost, *compiled])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def host_for(name: str) -> HostMemory | None:
    """The memory of the hosts of a topology as `fiddlex compile` takes it, such as `tpu:v5e:2x4`; None: not known."""
    kind = ":".join(name.split(":")[:2])
    topologies = map(load_topology, catalogue())
    return next((each.host for each in topologies if each.compiler and each.compiler.kind == kind), None)


if __name__ == "__main__":
    from fiddlex.terminal.command_line import run  # needed only when this module runs as a program

    run(lambda argv: print(table()))
