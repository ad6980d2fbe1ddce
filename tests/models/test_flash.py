"""In which fused kernel attention runs on the devices of a mesh."""

import types
from typing import Any

import numpy as np
import pytest

from fiddlex.config import Config, ModelConfig
from fiddlex.models.flash import compute_capability, kernel_on, make_kernel

MODEL = ModelConfig(hidden_size=128, num_heads=2, seq_len=256, dtype="bfloat16")


def mesh_of(platform: str, capability: str | None) -> Any:
    device = types.SimpleNamespace(platform=platform, compute_capability=capability)
    return types.SimpleNamespace(devices=np.array([device]))


@pytest.mark.parametrize(
    ("platform", "capability", "kernel"),
    [
        ("gpu", "7.0", ""),  # V100
        ("gpu", "7.5", ""),  # T4
        ("gpu", "8.0", "cudnn"),
        ("gpu", "9.0", "cudnn"),
        ("gpu", "10.0", "cudnn"),
        ("gpu", "gfx942", ""),  # AMD's
        ("cpu", None, "blocked"),
        ("tpu", None, "splash"),
    ],
)
def test_each_device_has_its_kernel(platform: str, capability: str | None, kernel: str) -> None:
    config, mesh = Config(model=MODEL), mesh_of(platform, capability)
    assert kernel_on(mesh, config, dropout=False).name == kernel
    assert (make_kernel(config, mesh) is not None) == bool(kernel)
    dropping = kernel_on(mesh, config, dropout=True)
    assert not dropping.name
    assert dropping.reason


def test_wide_heads_take_a_gpu_that_is_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """jax asks the machine's own GPUs whether they take heads wider than 128."""
    assert compute_capability(mesh_of("gpu", "9.0")) == 8
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    assert compute_capability(mesh_of("gpu", "9.0")) == 9
