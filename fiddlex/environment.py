"""What a report of a problem has to say of the machine: `fiddlex --version` prints it as one block.

Invariant: the answer comes within `TIMEOUT_S` seconds or so, whatever the devices do. A process of its own imports jax
and asks for them, and is killed if it takes longer: jax may wait for the metadata server of TPUs, or for a driver.
"""

import contextlib
import importlib.metadata
import pathlib
import platform
import subprocess
import sys

import fiddlex

TIMEOUT_S = 20.0
_COUNT_DEVICES = """
import collections, jax
counts = collections.Counter((each.platform, each.device_kind) for each in jax.devices())
print(", ".join(f"{count} {platform} ({kind})" for (platform, kind), count in counts.items()))
"""


def describe() -> str:
    """The versions of fiddlex and what it stands on, the platform and jax's devices, one on each line."""
    rows = {
        "fiddlex": fiddlex.__version__ + _revision(pathlib.Path(fiddlex.__file__).parents[1]),
        **{name: _installed(name) for name in ("jax", "jaxlib", "libtpu")},
        "Python": platform.python_version(),
        "platform": platform.platform(),
        "devices": devices(),
    }
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def devices(timeout_s: float = TIMEOUT_S) -> str:
    """The devices that jax finds, as in `8 gpu (NVIDIA H100 80GB HBM3)`, or why they are not known."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _COUNT_DEVICES], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process that waits for a driver ignores the signal
            process.communicate(timeout=1)
        return f"not known: jax gave no answer within {timeout_s:g} s"
    lines = (output if process.returncode == 0 else errors).strip().splitlines() or ["jax gave no reason"]
    return lines[-1] if process.returncode == 0 else f"not known: {lines[-1]}"


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _revision(root: pathlib.Path) -> str:
    """The git revision of a checkout, in brackets; empty for an installed package, or without git."""
    if not (root / ".git").exists():
        return ""
    try:
        revision = _git(root, "rev-parse", "--short=12", "HEAD")
        changed = ", changed" if _git(root, "status", "--porcelain", "--untracked-files=no") else ""
    except (OSError, subprocess.SubprocessError):
        return ""
    return f" (revision {revision}{changed})"


def _git(root: pathlib.Path, *arguments: str) -> str:
    line = ["git", "-C", str(root), *arguments]
    return subprocess.run(line, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
