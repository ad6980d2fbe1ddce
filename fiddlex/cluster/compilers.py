"""Which compilers for devices that the machine lacks are installed."""

import importlib.util

_CUDA_PLUGINS = "jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"


def missing_compiler(topology: str) -> str:
    """What to install before anything can be compiled for a topology; empty where nothing is missing.

    Args:
      topology: `tpu:…` or `gpu:…`, as `fiddlex compile` takes it; other topologies need nothing.
    """
    if topology.startswith("tpu:") and importlib.util.find_spec("libtpu") is None:
        return (
            f"Compiling for {topology} takes libtpu, which is not installed. It comes with the extra aot, for Linux on "
            "x86-64: pip install 'fiddlex[aot]'."
        )
    if topology.startswith("gpu:") and not _has_cuda_plugin():
        return (
            f"Compiling for {topology} takes jax's CUDA plugin, which is not installed. It comes with the extra "
            "aot-gpu, for Linux: pip install 'fiddlex[aot-gpu]'; no GPU has to be there."
        )
    return ""


def _has_cuda_plugin() -> bool:
    return importlib.util.find_spec("jax_plugins") is not None and any(map(importlib.util.find_spec, _CUDA_PLUGINS))
