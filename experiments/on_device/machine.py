"""The machine that a study runs on: its device, its driver, and versions.

    python -m experiments.on_device.machine

prints what jax says of the first device of JAX_PLATFORMS; `machine` runs it and adds the rest.
"""

import importlib.metadata
import json
import logging
import platform
import subprocess
import sys
from typing import Any

from experiments.on_device.programs import answer_of
from fiddlex.config import MeshConfig
from fiddlex.errors import DeviceError, FiddlexError

logger = logging.getLogger("fiddlex.gpu")

_PACKAGES = (
    "fiddlex",
    "jax",
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
)
_QUERY = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]


def machine(device: str) -> dict[str, Any]:
    """The machine, for the record of a result.

    Args:
      device: `cpu` or `cuda`.

    Raises:
      DeviceError: when jax finds no such device.
    """
    try:
        facts = answer_of("experiments.on_device.machine", device=device)
    except FiddlexError as error:
        raise DeviceError(
            f"jax finds no {device} device here:\n{error}\nTo try everything but CUDA on a CPU: --device=cpu "
            "--sizes=tiny."
        ) from error
    facts["driver"] = _driver() if device == "cuda" else None
    facts["versions"] = {"python": platform.python_version()} | _versions()
    return facts


def _driver() -> str | None:
    """The first GPU, its driver and its memory, as nvidia-smi tells them; None where there is no nvidia-smi."""
    try:
        return subprocess.run(_QUERY, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError) as error:
        logger.warning("nvidia-smi tells no driver: %s", error)
        return None


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def main() -> None:
    """Prints what jax says of the device."""
    from fiddlex.cluster.mesh import make_mesh, num_cores  # starts jax

    device = make_mesh(MeshConfig()).devices.flat[0]
    facts = {
        "platform": device.platform,
        "device_kind": device.device_kind,
        "compute_capability": getattr(device, "compute_capability", None),
        "cores": num_cores(),
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    try:
        main()
    except FiddlexError as error:
        sys.exit(str(error))
