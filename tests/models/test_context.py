"""Where attention runs in the flash kernel."""

import types

import numpy as np
import pytest

from fiddlex.cluster.gpu_targets import runs_flash
from fiddlex.config import ModelConfig
from fiddlex.models.context import compute_capability

MODEL = ModelConfig(hidden_size=128, num_heads=2, dtype="bfloat16")


@pytest.mark.parametrize(
    ("platform", "capability", "flash"),
    [
        ("gpu", "7.0", False),  # V100
        ("gpu", "7.5", False),  # T4
        ("gpu", "8.0", True),
        ("gpu", "9.0", True),
        ("gpu", "10.0", True),
        ("gpu", "gfx942", False),  # AMD's
        ("cpu", None, False),
        ("tpu", None, False),
    ],
)
def test_on_gpus_that_have_it(platform: str, capability: str | None, flash: bool) -> None:
    device = types.SimpleNamespace(platform=platform, compute_capability=capability)
    mesh = types.SimpleNamespace(devices=np.array([device]))
    found = compute_capability(mesh)  # type: ignore[arg-type]
    assert runs_flash(found, MODEL, dropout=False) == flash
    assert not runs_flash(found, MODEL, dropout=True)
    assert not runs_flash(found, ModelConfig(hidden_size=128, num_heads=2, dtype="float32"), dropout=False)
