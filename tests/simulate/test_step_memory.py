"""What the formulas say of a step's memory, against what XLA allots."""

import subprocess
import sys

import pytest

from experiments.benchmarks.programs import make_program, temporary_bytes
from experiments.benchmarks.sizes import with_microbatches
from fiddlex.config import Config
from fiddlex.simulate.memory import Memory, step_memory
from fiddlex.train.program import Program

TOLERANCE = 0.1

CASES = {  # schedule, chunks, recompute, microbatches, data, tensor, sequence parallel, dropout
    "1f1b": ("1f1b", 1, "none", 8, 1, 1, False, 0.0),
    "full recomputation under dropout": ("1f1b", 1, "full", 8, 1, 1, False, 0.1),
    "selective recomputation under dropout": ("1f1b", 1, "selective", 16, 1, 1, False, 0.1),
    "full recomputation with sequence parallelism": ("1f1b", 1, "full", 8, 1, 2, True, 0.0),
    "interleaved, tensor parallel, with dropout": ("interleaved_1f1b", 2, "none", 4, 1, 2, True, 0.1),
    "split backwards": ("zb_h1", 1, "none", 8, 1, 1, False, 0.0),
    "split backwards that recompute": ("zb_h1", 1, "full", 8, 1, 1, False, 0.0),
    "split backwards in a V on two replicas": ("zb_v", 2, "selective", 8, 2, 1, False, 0.0),
    "gpipe": ("gpipe", 1, "selective", 4, 1, 1, False, 0.0),
}


@pytest.mark.parametrize("case", CASES)
def test_prediction_is_near_what_xla_allots(case: str) -> None:
    schedule, chunks, recompute, microbatches, data, tensor, sequence_parallel, dropout = CASES[case]
    config = sized(hidden_size=128, seq_len=256)
    config.mesh.data, config.mesh.tensor, config.mesh.sequence_parallel = data, tensor, sequence_parallel
    config.model.dropout = dropout
    config.pipeline.schedule, config.pipeline.num_chunks, config.pipeline.recompute = schedule, chunks, recompute
    program = make_program(with_microbatches(config, microbatches, microbatch_size=2))
    assert predicted(program).total == pytest.approx(temporary_bytes(program, program.step), rel=TOLERANCE)


def test_gradients_and_their_reduction_are_most_of_a_wide_model_on_short_sequences() -> None:
    config = sized(hidden_size=512, seq_len=32)
    config.pipeline.recompute = "full"
    program = make_program(with_microbatches(config, 8))
    memory = predicted(program)
    assert memory.total == memory.gradients + memory.update
    assert memory.total == pytest.approx(temporary_bytes(program, program.step), rel=TOLERANCE)


def test_parts_follow_the_sizes() -> None:
    config = with_microbatches(sized(hidden_size=128, seq_len=256), 8)
    base = predicted(make_program(config))
    more = predicted(make_program(with_microbatches(config, 32)))
    assert more == base
    config.model.dtype = "bfloat16"
    half = predicted(make_program(config))
    assert half.inboxes == base.inboxes / 2
    assert half.gradients == base.gradients == 2 * half.weights
    assert base.weights == base.weight_stash == 0


def test_imports_no_jax() -> None:
    code = "import sys, fiddlex.simulate.memory; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def predicted(program: Program) -> Memory:
    return step_memory(program.config, program.layout.lowered, program.layout.placement)


def sized(*, hidden_size: int, seq_len: int) -> Config:
    config = Config()
    config.model.num_layers, config.model.hidden_size, config.model.seq_len = 8, hidden_size, seq_len
    config.mesh.pipe = 4
    return config
