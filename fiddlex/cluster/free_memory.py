"""How much memory of this machine a process can still take, as Linux tells it.

The machine has its own limit, and each control group (cgroup) that the process is in may have another: that of a
container, a Slurm job or a Kubernetes pod. Beyond it the kernel kills the process without a message. Several processes
may share a limit. Where there is no /proc, as on macOS, nothing is known.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MACHINE = "on the machine"
_CACHE = "active_file", "inactive_file", "slab_reclaimable"  # of memory.stat: what the kernel frees when asked for more


class Limit(NamedTuple):
    """A limit on the memory of this process and others."""

    where: str  # `MACHINE`, or `in control group /path`
    free: int  # bytes that processes under the limit can still take before something is swapped or killed
    swap: int  # bytes that the machine can still move to its swap space


def machine_id() -> str:
    """A text that is equal in processes of one machine and container, where a control group's path means one group."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/mnt')}"
    return ""  # not known


def limits(root: Path = Path("/")) -> list[Limit]:
    """The limits on the memory of this process; empty where they are not known. Tests give another `root`."""
    try:
        of_machine = _sizes((root / "proc/meminfo").read_text(encoding="utf-8"))
        free, swap = of_machine["MemAvailable"], of_machine["SwapFree"]
    except (OSError, KeyError, ValueError):
        return []
    return [Limit(MACHINE, free, swap), *_of_groups(root, swap)]


def _of_groups(root: Path, swap: int) -> Iterator[Limit]:
    """The limits of the control groups of this process, in version 1 or 2 of their interface."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            mount, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        else:
            continue
        # In a container the path may be that of the host, which is not there; then the mount is the container's group.
        inner = Path(path.lstrip("/"))
        for group in (inner, *inner.parents) if inner.parts else (inner,):
            with contextlib.suppress(OSError, KeyError, ValueError):  # no such group, or no limit: "max"
                limit, used = (int((mount / group / name).read_text(encoding="ascii")) for name in names[:2])
                about = _sizes((mount / group / "memory.stat").read_text(encoding="ascii"))
                cache = sum(about.get(f"{names[2]}{kind}", 0) for kind in _CACHE)
                yield Limit(f"in control group {Path('/') / group}", max(limit - used + cache, 0), swap)


def _sizes(text: str) -> dict[str, int]:
    """Bytes by name, from lines such as `MemAvailable: 12 kB` or `inactive_file 4096`."""
    sizes = {}
    for line in text.splitlines():
        name, value, *unit = line.replace(":", " ").split()
        sizes[name] = int(value) * (1024 if unit == ["kB"] else 1)
    return sizes
