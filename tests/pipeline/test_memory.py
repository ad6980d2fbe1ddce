"""Memory of a step does not grow with its microbatches, whatever the schedule."""

import pytest

from experiments.benchmarks.memory import fiddlex_bytes, with_microbatches
from fiddlex.config import Config

MICROBATCHES = (8, 32, 128)
TOKEN_BYTES = 12  # `tokens`, `targets` and `weights` of which XLA keeps a copy in the loop
TABLE_BYTES = 4 * 32 * 4  # at most so many columns in a tick, and so many ticks for a microbatch

CASES = {
    "1f1b": ("1f1b", 1, "none"),
    "1f1b that recomputes": ("1f1b", 1, "full"),
    "interleaved": ("interleaved_1f1b", 2, "selective"),
    "split backwards": ("zb_h1", 1, "none"),
    "split backwards in a V": ("zb_v", 2, "none"),
}


@pytest.mark.parametrize("case", CASES)
def test_more_microbatches_take_no_more_memory(case: str) -> None:
    config = large_config()
    config.pipeline.schedule, config.pipeline.num_chunks, config.pipeline.recompute = CASES[case]
    sizes = [fiddlex_bytes(with_microbatches(config, count)) for count in MICROBATCHES]
    assert max(sizes) < 1.01 * min(sizes)
    # And what does grow is the batch: a loss for each microbatch, and its tokens.
    per_microbatch = (sizes[-1] - sizes[0]) / (MICROBATCHES[-1] - MICROBATCHES[0])
    assert per_microbatch <= TOKEN_BYTES * config.model.seq_len + 4 + TABLE_BYTES


def test_as_gpipe_holds_every_microbatch_its_memory_does_grow() -> None:
    config = large_config()
    config.pipeline.schedule = "gpipe"
    sizes = [fiddlex_bytes(with_microbatches(config, count)) for count in (8, 32)]
    assert sizes[1] > 3 * sizes[0]


def large_config() -> Config:
    """Sizes at which one activation of one layer is more than 1% of a step's memory."""
    config = Config()
    config.model.num_layers, config.model.hidden_size, config.model.seq_len = 8, 256, 128
    config.mesh.pipe = 4
    return config
