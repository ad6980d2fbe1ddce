"""Memory of a step does not grow with its microbatches, whatever the schedule."""

import pytest

from experiments.benchmarks.programs import make_program, temporary_bytes
from experiments.benchmarks.sizes import with_microbatches
from fiddlex.config import Config
from fiddlex.schedules.table import COLUMNS

CASES = {
    "1f1b": ("1f1b", 1, "none", 0.0),
    "1f1b that recomputes": ("1f1b", 1, "full", 0.0),
    "interleaved": ("interleaved_1f1b", 2, "selective", 0.1),
    "split backwards": ("zb_h1", 1, "none", 0.0),
}
# For each microbatch a loss, and up to three ticks of the schedule's table; for each example the keys of its dropout.
MICROBATCH_BYTES, KEY_BYTES = 4 + 3 * 4 * (len(COLUMNS) + 2), 32


LONG = ("1f1b", "1f1b that recomputes", "interleaved")


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.long] * (case in LONG)) for case in CASES])
def test_more_microbatches_take_no_more_memory(case: str) -> None:
    config = large_config()
    schedule, chunks, recompute, config.model.dropout = CASES[case]
    config.pipeline.schedule, config.pipeline.num_chunks, config.pipeline.recompute = schedule, chunks, recompute
    few, some, many = (step_bytes(with_microbatches(config, count)) for count in (8, 32, 128))
    assert max(few, some, many) < 1.01 * min(few, some, many)
    # An activation for each microbatch would be 128 kB of them, and a copy of its part of the batch 1.5 kB.
    assert (many - few) / 120 <= MICROBATCH_BYTES + KEY_BYTES * (config.model.dropout > 0)


@pytest.mark.long
def test_memory_grows_where_the_schedule_holds_every_microbatch() -> None:
    config = large_config()
    config.pipeline.schedule = "gpipe"
    few, many = (step_bytes(with_microbatches(config, count)) for count in (8, 32))
    assert many > 3 * few


def large_config() -> Config:
    """Sizes at which one activation for each microbatch would be a third of a step's memory and more."""
    config = Config()
    config.model.num_layers, config.model.hidden_size, config.model.seq_len = 8, 256, 128
    config.mesh.pipe = 4
    return config


def step_bytes(config: Config) -> int:
    program = make_program(config)
    return temporary_bytes(program, program.step)
