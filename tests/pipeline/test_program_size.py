"""A step is a loop over ticks with one over layers in it: its program is as long for many of either as for few."""

import re

import pytest

from experiments.benchmarks.programs import make_program
from experiments.benchmarks.sizes import with_microbatches
from fiddlex.config import Config


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [("interleaved_1f1b", 2), *(pytest.param(name, 1, marks=pytest.mark.long) for name in ("1f1b", "zb_h1"))],
)
def test_program_does_not_grow(schedule: str, chunks: int, tiny_config: Config) -> None:
    tiny_config.mesh.pipe, tiny_config.model.dropout = 4, 0.1
    tiny_config.pipeline.schedule, tiny_config.pipeline.num_chunks = schedule, chunks
    counts = set()
    for num_layers, num_microbatches in [(8, 8), (8, 128), (96, 8)]:
        tiny_config.model.num_layers = num_layers
        program = make_program(with_microbatches(tiny_config, num_microbatches))
        text = program.lower().as_text()
        counts.add(len(re.findall(r" = (?:stablehlo|func|call|sdy|\")", text)))
    assert len(counts) == 1
    assert min(counts) > 100  # the pattern does match operations
