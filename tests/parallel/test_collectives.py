"""Tensor parallelism costs what Megatron-LM says: one reduction for each product pair and direction.

In rings, all of them are permutes; in blocks there is one for each block.
"""

import re

import jax
import pytest

from fiddlex.config import Config, MeshConfig
from fiddlex.hardware import pieces
from fiddlex.models.blocks import Blocks
from fiddlex.models.exchange import Exchange
from fiddlex.models.rings import Rings
from tests.mapped_layer import mapped_layer


@pytest.mark.parametrize(
    ("sequence_parallel", "exchange"),
    [(False, None), (True, None), (True, Rings(permutes=True)), (True, Blocks())],
)
def test_a_layer_has_two_reductions_each_way(
    sequence_parallel: bool, exchange: Exchange | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "LEAST_ROWS", 1)
    config = Config(mesh=MeshConfig(tensor=2, sequence_parallel=sequence_parallel))
    config.model.num_layers, config.model.hidden_size, config.model.seq_len = 1, 32, 16
    mapped, shapes = mapped_layer(config, exchange)
    text = jax.jit(mapped).lower(*shapes).as_text()
    counts = {
        kind: len(re.findall(rf"stablehlo\.{kind}\b", text))
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "collective_permute")
    }
    found = {kind: count for kind, count in counts.items() if count}
    if isinstance(exchange, Rings):  # two halves each, and two for each input that is gathered again
        assert found == {"collective_permute": 2 * (4 + 4 + 2)}
    elif exchange:  # 8 blocks for each; an input is gathered again as a whole
        assert found == {"all_gather": 4 * 8 + 2, "reduce_scatter": 4 * 8}
    elif sequence_parallel:
        assert found == {"all_gather": 4, "reduce_scatter": 4}
    else:
        assert found == {"all_reduce": 4}
