"""Fixtures of the tests of Flax modules."""

import pytest

from fiddlex.config import Config
from fiddlex.config.families import FAMILIES
from tests.flax import modules


@pytest.fixture(autouse=True)
def families(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "nnx", modules.NNX)
    monkeypatch.setitem(FAMILIES, "linen", modules.LINEN)
    monkeypatch.setitem(FAMILIES, "fused", modules.FUSED)
    for name in ("pair", "sow", "sown"):
        monkeypatch.setitem(FAMILIES, name, modules.WITH_LOSSES[name])


@pytest.fixture
def config(tiny_config: Config) -> Config:
    """NNX on data=2 × pipe=2, four layers."""
    tiny_config.model.family, tiny_config.model.num_layers = "nnx", 4
    tiny_config.mesh.data, tiny_config.mesh.pipe = 2, 2
    tiny_config.pipeline.schedule, tiny_config.pipeline.num_microbatches = "1f1b", 4
    tiny_config.optimizer.schedule = "constant"
    return tiny_config
