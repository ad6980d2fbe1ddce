"""Which accelerators this machine can have, so that jax loads no plugin in vain.

Where libtpu is installed (extra `aot`, to compile for TPUs that are not there), jax would load it in every process. It
then looks for TPUs, writes a page of warnings when it finds none, and keeps other processes from loading it.
"""

import importlib.metadata
import importlib.util
import os
from pathlib import Path

import jax

_GOOGLE = "0x1ae0"  # vendor of the PCI devices
_NETWORK = "0x02"  # beginning of the class of its network cards
_PCI = Path("/sys/bus/pci/devices")
_TPU_FILES = ("/dev/accel0", "/dev/vfio")
_GPU_FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")


def leave_out_absent_tpu() -> None:
    """Lets jax use CPUs alone where libtpu is installed, and this machine has neither TPU nor GPU.

    It has an effect only before jax's first use, and none where the user has named the platforms (JAX_PLATFORMS).
    """
    if _named_platforms() or "JAX_FORCE_TPU_INIT" in os.environ or not _is_installed("libtpu"):
        return
    if not _may_have_tpu() and not _may_have_other():
        jax.config.update("jax_platforms", "cpu")


def libtpu_is_loaded() -> bool:
    try:
        return "/libtpu.so" in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux, for which alone there is a libtpu
        return False


def _named_platforms() -> str:
    named: str | None = jax.config.jax_platforms  # type: ignore[attr-defined]
    return named or ""


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _may_have_tpu() -> bool:
    if any(os.path.exists(name) for name in _TPU_FILES):
        return True
    for device in _PCI.glob("*"):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        if vendor == _GOOGLE and not kind.startswith(_NETWORK):
            return True
    return False


def _may_have_other() -> bool:
    """Whether a plugin of jax for other accelerators is installed; of one for NVIDIA's GPUs, whether there is one."""
    plugins = _plugins()
    if any(not name.startswith("xla_cuda") for name in plugins):
        return True
    return bool(plugins) and any(os.path.exists(name) for name in _GPU_FILES)


def _plugins() -> set[str]:
    """The names of jax's plugins, which it finds as modules of `jax_plugins` and as entry points."""
    spec = importlib.util.find_spec("jax_plugins")
    places = (spec.submodule_search_locations or []) if spec else []
    names = {path.name for place in places for path in Path(place).glob("*")}
    names |= {entry.value.rpartition(".")[2] for entry in importlib.metadata.entry_points(group="jax_plugins")}
    return {name for name in names if not name.startswith("_")}
