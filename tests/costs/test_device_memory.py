"""What the formulas say of a step's memory, against what XLA allots."""

import math

import jax
import pytest

from experiments.benchmarks.programs import make_program, temporary_bytes
from experiments.benchmarks.sizes import with_microbatches
from fiddlex.config import Config
from fiddlex.config.overrides import replaced
from fiddlex.costs.backend import CPU, TPU
from fiddlex.costs.memory import Memory
from fiddlex.models import collective_matmul
from fiddlex.models.flash import make_splash
from fiddlex.parallel.host_memory import HOST
from fiddlex.planner.predict import needed_memory
from fiddlex.train.step import gradients

TOLERANCE = 0.1

CASES = {  # schedule, chunks, recompute, microbatches, data, tensor, sequence parallelism, dropout
    "1f1b": ("1f1b", 1, "none", 8, 1, 1, False, 0.0),
    "full recomputation under dropout": ("1f1b", 1, "full", 8, 1, 1, False, 0.1),
    "selective recomputation under dropout": ("1f1b", 1, "selective", 16, 1, 1, False, 0.1),
    "full recomputation with sequence parallelism": ("1f1b", 1, "full", 8, 1, 2, True, 0.0),
    "interleaved, tensor parallel, with dropout": ("interleaved_1f1b", 2, "none", 4, 1, 2, True, 0.1),
    "products in rings": ("1f1b", 1, "none", 8, 1, 2, "rings", 0.0),
    "products in blocks": ("1f1b", 1, "none", 8, 1, 2, "blocks", 0.0),
    "split backwards": ("zb_h1", 1, "none", 8, 1, 1, False, 0.0),
    "split backwards that recompute": ("zb_h1", 1, "full", 8, 1, 1, False, 0.0),
    "split backwards in a V on two replicas": ("zb_v", 2, "selective", 8, 2, 1, False, 0.0),
    "gpipe": ("gpipe", 1, "selective", 4, 1, 1, False, 0.0),
}


SPLIT = {"pipeline.semantics": "delay:2", "pipeline.schedule": "zb_h1"}
RINGS = {"mesh.sequence_parallel": True, "mesh.collective_matmul": True}
STATES = {  # what is changed of a small GPT on 2 × 2 × 2 devices
    "adamw": {},
    "without ZeRO-1": {"optimizer.zero1": False},
    "lamb, a vocabulary that is padded": {"optimizer.name": "lamb", "model.vocab_size": 251},
    "sgd": {"optimizer.name": "sgd"},
    "sgd without momentum": {"optimizer.name": "sgd", "optimizer.momentum": 0.0},
    "muon": {"optimizer.name": "muon"},
    "lion": {"optimizer.name": "lion"},
    "adan": {"optimizer.name": "adan"},
    "adafactor": {"optimizer.name": "adafactor", "model.hidden_size": 256, "model.num_heads": 2},
    "adafactor, a vocabulary that is padded": {"optimizer.name": "adafactor", "model.vocab_size": 253},
    "adafactor, a vocabulary that only padding makes large enough to be factored": {
        "optimizer.name": "adafactor",
        "model.vocab_size": 127,
    },
    "optimizer on the host": {"optimizer.offload": True},
    "adafactor on the host": {"optimizer.offload": True, "optimizer.name": "adafactor", "model.hidden_size": 256},
    "muon on the host, 2bw": {"optimizer.offload": True, "optimizer.name": "muon", "pipeline.semantics": "2bw"},
    "uneven stages": {"model.num_layers": 5},
    "sizes that replicas cannot cut": {"mesh.data": 4, "mesh.tensor": 1, "model.seq_len": 30, "model.vocab_size": 30},
    "2bw": {"pipeline.semantics": "2bw", "model.dtype": "bfloat16"},
    "2bw, float32": {"pipeline.semantics": "2bw"},
    "2bw, predicted from one update": {"pipeline.semantics": "2bw", "pipeline.prediction": "extrapolate"},
    "2bw, predicted from two updates": {
        "pipeline.semantics": "2bw",
        "pipeline.prediction": "extrapolate",
        "pipeline.prediction_order": 2,
    },
    "stash, predicted": {
        "pipeline.semantics": "stash",
        "pipeline.prediction": "momentum",
        "model.dtype": "bfloat16",
    },
    "stash, recomputed": {"pipeline.semantics": "stash", "pipeline.recompute": "full", "model.dropout": 0.1},
    "delay, split backwards": SPLIT,
    "2bw, products in rings": {"pipeline.semantics": "2bw", **RINGS},
    "products in rings, split backwards": {"pipeline.recompute": "none", **SPLIT, **RINGS},
    "products in rings, split backwards that recompute": {"pipeline.recompute": "full", **SPLIT, **RINGS},
    "llama, products in rings": {"model.family": "llama", "pipeline.recompute": "selective", **SPLIT, **RINGS},
    "mlm": {"model.family": "bert"},
    "mlm_nsp, post-LN": {"model.family": "bert", "model.objective": "mlm_nsp", "model.post_norm": True},
    "classification": {
        "model.family": "bert",
        "model.objective": "classification",
        "data.labels": "a,b,c",
        "data.source": "tsv:none",
    },
    "multiple choice": {
        "model.family": "bert",
        "model.objective": "multiple_choice",
        "data.num_choices": 3,
        "data.source": "jsonl:none",
    },
}


# CPUs have a kernel of attention for 256 positions, unless there is dropout, and none for 192.
LENGTHS = [(case, length) for case, facts in CASES.items() for length in (192, 256) if length == 256 or not facts[-1]]
QUICK = (  # of the default tier: dropout, products in pieces, split backwards, and the kernel
    ("selective recomputation under dropout", 256),
    ("products in blocks", 192),
    ("split backwards in a V on two replicas", 256),
)


@pytest.mark.parametrize(
    ("case", "seq_len"), [pytest.param(*pair, marks=[pytest.mark.long] * (pair not in QUICK)) for pair in LENGTHS]
)
def test_prediction_is_near_what_xla_allots(case: str, seq_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule, chunks, recompute, microbatches, data, tensor, sequence, dropout = CASES[case]
    config = sized(hidden_size=128, seq_len=seq_len)
    config.mesh.data, config.mesh.tensor = data, tensor
    config.mesh.sequence_parallel, config.mesh.collective_matmul = bool(sequence), sequence in ("rings", "blocks")
    monkeypatch.setattr(collective_matmul, "runs_in_blocks", lambda platform: sequence == "blocks")
    config.model.dropout = dropout
    config.pipeline.schedule, config.pipeline.num_chunks, config.pipeline.recompute = schedule, chunks, recompute
    program = make_program(with_microbatches(config, microbatches, microbatch_size=2))
    expected = temporary_bytes(program, program.step)
    assert temporaries(predicted(program.config)) == pytest.approx(expected, rel=TOLERANCE)


def test_gradients_and_their_reduction_are_most_of_a_wide_model_on_short_sequences() -> None:
    config = sized(hidden_size=512, seq_len=32)
    config.pipeline.recompute = "full"
    program = make_program(with_microbatches(config, 8))
    memory = predicted(program.config)
    assert temporaries(memory) == memory.gradients + memory.update
    assert temporaries(memory) == pytest.approx(temporary_bytes(program, program.step), rel=TOLERANCE)


@pytest.mark.parametrize("case", STATES)
def test_arguments_of_the_step_are_counted_exactly(case: str) -> None:
    config = Config()
    config.mesh.data, config.mesh.pipe, config.mesh.tensor = 2, 2, 2
    config.pipeline.num_microbatches, config.data.global_batch_size = 4, 16
    program = make_program(replaced(config, STATES[case]))
    memory, state = predicted(program.config), program.abstract_state
    assert memory.weights == local_bytes(state.weights)
    arrays = [x for x in jax.tree.leaves(state.optimizer) if x.size > 1]  # the others are counters and fillers
    assert memory.optimizer == local_bytes(arrays)
    assert memory.host_state == local_bytes((state.weights, arrays), kind=HOST)
    assert bool(memory.host_state) == program.config.optimizer.offload
    inputs = program.source.abstract_inputs
    assert memory.inputs == local_bytes(inputs.batches if state.pipeline else inputs)
    if state.pipeline:
        carry = state.pipeline.in_flight.carry
        assert memory.compute_weights + memory.versions == local_bytes(state.pipeline.versions)
        layers = state.weights["layers"]
        finished = local_bytes(carry.finished) or local_bytes(layers) + local_bytes(layers, kind=HOST)
        assert memory.gradients == local_bytes(carry.grads) + finished
        assert memory.stash == local_bytes(carry.stash)
        assert memory.weight_stash == local_bytes(carry.weight_stash)
        assert memory.inboxes == local_bytes((carry.forward_inbox, carry.backward_inbox, carry.outgoing))


def test_the_stash_of_the_kernel_of_tpus_is_counted_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "make_kernel", lambda config, mesh: make_splash(config, interpret=True))
    config = Config()
    config.model.hidden_size, config.model.num_heads, config.model.dtype = 256, 4, "bfloat16"
    config.mesh.pipe, config.mesh.tensor, config.pipeline.semantics = 2, 2, "2bw"
    config.pipeline.num_microbatches, config.data.global_batch_size = 4, 16
    program = make_program(config)
    memory = needed_memory(program.config, TPU)
    assert TPU.flash_kernel(config).name
    assert memory.stash == local_bytes(program.abstract_state.pipeline.in_flight.carry.stash)


def test_parts_follow_the_sizes() -> None:
    config = with_microbatches(sized(hidden_size=128, seq_len=256), 8)
    base, more = predicted(config), predicted(with_microbatches(config, 32))
    assert more == base._replace(inputs=4 * base.inputs)
    config.model.dtype = "bfloat16"
    half = predicted(config)
    assert half.inboxes == base.inboxes / 2
    assert half.gradients == base.gradients == 2 * half.compute_weights
    assert base.compute_weights == base.weight_stash == base.versions == 0


def test_padding_is_the_least_that_any_order_of_dimensions_needs() -> None:
    assert TPU.tiled((24, 2304, 3, 24, 96)) == math.prod((24, 2304, 3, 24, 96))  # 2304 = 18 · 128 last, 24 before it
    assert TPU.tiled((24, 288, 3, 24, 96)) == 24 * 288 * 3 * 24 * 128
    assert TPU.tiled((5, 7)) == 8 * 128
    assert TPU.tiled((5,)) == 5
    assert CPU.tiled((5, 7)) == 35


def predicted(config: Config) -> Memory:
    return needed_memory(config, CPU)


def temporaries(memory: Memory) -> int:
    """All but the arguments of a step with a flush after each batch."""
    return memory.peak - memory.weights - memory.optimizer - memory.inputs


def local_bytes(tree: object, kind: str = "device") -> int:
    """Bytes of one device's parts of arrays that need not be there, in one kind of memory."""
    found = (x for x in jax.tree.leaves(tree) if x.sharding.memory_kind == kind)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in found)


def sized(*, hidden_size: int, seq_len: int) -> Config:
    config = Config()
    config.model.num_layers, config.model.hidden_size, config.model.seq_len = 8, hidden_size, seq_len
    config.mesh.pipe = 4
    return config
