"""Which compilers for devices that the machine lacks are installed."""

import importlib.metadata
import importlib.util
import os
import re
import shlex
import sys

from fiddlex.errors import installation

# With weights from the host and ZeRO-1, libtpu 0.0.52 compiled for v5e on two replicas hidden sizes of 64, 128, 192 and
# 256, and refused 32, 48, 96 and 160; on four it compiled 128 and 256, and refused 48, 64, 96 and 192. On one, and
# without ZeRO-1, it compiled 48, and on data=2 × tensor=2 96 too (2026-11-28).
_STREAMED_WIDTH = 32  # of a replica's part
_CUDA_PLUGINS = "jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"


def missing_compiler(topology: str) -> str:
    """What to install to compile for a topology of `fiddlex compile`, `tpu:…` or `gpu:…`; empty: nothing is missing."""
    if topology.startswith("tpu:") and importlib.util.find_spec("libtpu") is None:
        return (
            f"Compiling for {topology} takes libtpu, which is not installed. It comes with the extra aot, for Linux on "
            f"x86-64: {installation('aot')}."
        )
    if topology.startswith("gpu:") and not _has_cuda_plugin():
        return (
            f"Compiling for {topology} takes jax's CUDA plugin, which is not installed. It comes with the extra "
            f"aot-gpu, for Linux: {installation('aot-gpu')}; no GPU has to be there."
        )
    return ""


def refused_width(platform: str, hidden_size: int, *, replicas: int, zero1: bool) -> str:
    """Why a platform's compiler refuses a hidden size with weights from the host; empty: it does not."""
    width = _STREAMED_WIDTH * replicas
    if platform != "tpu" or replicas == 1 or not zero1 or hidden_size % width == 0:
        return ""
    return (
        f"With pipeline.weights_memory=host, optimizer.zero1=True and mesh.data={replicas}, libtpu takes multiples of "
        f"{width} as model.hidden_size, and {hidden_size} is none: use one, or optimizer.zero1=False, or fewer "
        "replicas, or pipeline.weights_memory=device."
    )


def libtpu_version() -> str:
    """The version of the libtpu that compiles for TPUs: the installed package's, or the file that the user has set."""
    file, package = os.environ.get("TPU_LIBRARY_PATH"), importlib.util.find_spec("libtpu")
    # The package, once imported, sets the variable to its own library.
    if file and not (package and package.origin and os.path.dirname(package.origin) == os.path.dirname(file)):
        return file
    return importlib.metadata.version("libtpu")


def libtpu_that_jax_names() -> str:
    """The version of libtpu with which the installed jax is released, such as `0.0.42`; empty: jax names none."""
    requirements = "\n".join(importlib.metadata.requires("jax") or ())
    found = re.search(r"^libtpu==([\d.]*\d)", requirements, re.MULTILINE)
    return found[1] if found else ""


def other_libtpu(used: str, named: str) -> str:
    """A sentence for people if jax names another libtpu than `used`, else empty; `0.0.42` stands for `0.0.42.1` too."""
    if not named or used == named or used.startswith(f"{named}."):
        return ""
    return (
        f"Compiled by libtpu {used}. The installed jax names libtpu {named}, which may compile the step to another "
        "program (docs/ahead_of_time.md); to compile with it: "
        f"{shlex.quote(sys.executable)} -m pip install 'libtpu=={named}.*'."
    )


def _has_cuda_plugin() -> bool:
    return importlib.util.find_spec("jax_plugins") is not None and any(map(importlib.util.find_spec, _CUDA_PLUGINS))
