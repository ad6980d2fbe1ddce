"""What tests need that compile for devices which are not there."""

import importlib.util

import pytest

_PLUGINS = "jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"

needs_cuda_plugin = pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins") is None or not any(map(importlib.util.find_spec, _PLUGINS)),
    reason="compiling for GPUs takes jax's CUDA plugin, of the extra `aot-gpu`",
)
