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
_TPU_FILES = ("/dev/accel0", "/dev/vfio")
_GPU_FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")


def leave_out_absent_tpu() -> None:
    """Lets jax use CPUs alone where libtpu is installed, and this machine has neither TPU nor GPU.

    It has an effect only before jax's first use, and none where the user has said which platforms to use
    (JAX_PLATFORMS).
    """
    if jax.config.jax_platforms or importlib.util.find_spec("libtpu") is None:  # type: ignore[attr-defined]
        return
    if "JAX_FORCE_TPU_INIT" in os.environ or _may_have_tpu() or _may_have_other():
        return
    jax.config.update("jax_platforms", "cpu")


def libtpu_is_loaded() -> bool:
    """Whether this process has loaded libtpu."""
    try:
        return "/libtpu.so" in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux, for which alone there is a libtpu
        return False


def _may_have_tpu() -> bool:
    return any(os.path.exists(name) for name in _TPU_FILES) or any(_pci_tpus())


def _pci_tpus() -> list[Path]:
    """Google's PCI devices that are no network cards."""
    found = []
    for device in Path("/sys/bus/pci/devices").glob("*"):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        if vendor == _GOOGLE and not kind.startswith(_NETWORK):
            found.append(device)
    return found


def _may_have_other() -> bool:
    """Whether a plugin of jax for other accelerators is installed; of one for NVIDIA's GPUs, whether there is one."""
    spec = importlib.util.find_spec("jax_plugins")
    places = (spec.submodule_search_locations or []) if spec else []
    names = {path.name for place in places for path in Path(place).glob("*")}
    names |= {entry.value.rpartition(".")[2] for entry in importlib.metadata.entry_points(group="jax_plugins")}
    plugins = {name for name in names if not name.startswith("_")}
    if any(not name.startswith("xla_cuda") for name in plugins):
        return True
    return bool(plugins) and any(os.path.exists(name) for name in _GPU_FILES)
