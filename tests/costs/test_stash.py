"""What the formulas say that a layer saves for its backward pass, against what the executor stashes of it."""

import itertools
import math
from typing import Any

import jax
import pytest

from experiments.benchmarks.programs import make_program
from fiddlex.config import Config
from fiddlex.config.overrides import replaced
from fiddlex.config.values.recompute import PARTS, written
from fiddlex.costs.backend import CPU
from fiddlex.costs.layer_memory import LayerMemory
from fiddlex.pipeline.carry import Carry
from fiddlex.pipeline.engine import Engine

LISTS = [written(some) for size in range(len(PARTS) + 1) for some in itertools.combinations(PARTS, size)]
QUICK = [LISTS[0], LISTS[-1], *PARTS, written(("gelu", "norms"))]  # of the default tier, the first two for all models
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "bert": {"model.family": "bert", "model.post_norm": True},
    "bert, pre-LN": {"model.family": "bert"},
    "llama": {"model.family": "llama", "model.num_kv_heads": 4},
    "qwen": {"model.family": "llama", "model.num_kv_heads": 2, "model.qk_norm": True},
}
MESHES: dict[str, dict[str, Any]] = {
    "one rank": {},
    "tensor": {"mesh.tensor": 2},
    "sequence": {"mesh.tensor": 2, "mesh.sequence_parallel": True},
    "pieces": {"mesh.tensor": 2, "mesh.sequence_parallel": True, "mesh.collective_matmul": True},
}


def a_config(model: str, mesh: str, recompute: str, *, dropout: bool, seq_len: int = 64) -> Config:
    config = Config()
    config.model.num_layers, config.model.hidden_size, config.model.num_heads = 2, 64, 4
    config.model.seq_len, config.model.vocab_size, config.model.dtype = seq_len, 64, "bfloat16"
    config.model.dropout = 0.1 * dropout
    config.data.global_batch_size = 4
    changes = {"pipeline.recompute": recompute} | MODELS[model] | MESHES[mesh]
    return replaced(config, changes).validate()


def stashed_bytes(config: Config, monkeypatch: pytest.MonkeyPatch) -> float:
    """Bytes of a row of a slot of the stash, in the step of this machine's devices."""
    carries: list[Carry] = []
    start = Engine.start

    def kept(engine: Engine) -> Carry:
        carries.append(start(engine))
        return carries[-1]

    monkeypatch.setattr(Engine, "start", kept)
    make_program(config).lower()
    return sum(math.prod(leaf.shape[2:]) * jax.dtypes.itemsize_bits(leaf.dtype) / 8 for leaf in carries[0].stash)


CASES = [  # model, mesh, dropout
    ("gpt", "one rank", False),
    ("gpt", "sequence", True),
    ("bert", "sequence", True),
    ("bert, pre-LN", "tensor", False),
    ("llama", "pieces", True),
    ("qwen", "sequence", False),
]


@pytest.mark.parametrize(
    ("model", "mesh", "dropout", "recompute"),
    [
        pytest.param(*case, parts, marks=[] if parts in QUICK[: None if case == CASES[1] else 2] else pytest.mark.long)
        for case in CASES
        for parts in LISTS
    ],
)
def test_the_stash_of_a_layer_is_what_the_formulas_say(
    model: str, mesh: str, dropout: bool, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = a_config(model, mesh, recompute, dropout=dropout)
    assert stashed_bytes(config, monkeypatch) == pytest.approx(LayerMemory.of(config, CPU).stash(), rel=0.01)


ENCODED = [  # model, mesh, dropout, positions, recompute: statistics, whole heads, several blocks, what post-LN reads
    ("gpt", "one rank", False, 64, "none"),
    ("gpt", "sequence", True, 64, "gelu,norms"),
    ("gpt", "tensor", False, 256, "none"),
    ("bert", "sequence", True, 160, "none"),
    ("bert", "pieces", True, 64, "masks"),
    ("bert", "tensor", False, 64, "norms"),
    ("bert, pre-LN", "one rank", True, 64, "attention"),
    ("llama", "pieces", True, 64, "norms"),
    ("llama", "one rank", False, 256, "norms"),
    ("qwen", "sequence", False, 160, "gelu"),
]


# The default tier has each model with one of the four pairs of dtypes, and each pair at least twice.
PAIRS = list(itertools.product(("int8", "float8_e4m3fn"), ("bfloat16", "float32")))


@pytest.mark.parametrize(
    ("model", "mesh", "dropout", "seq_len", "recompute", "stash_dtype", "dtype"),
    [
        pytest.param(*case, *pair, marks=[pytest.mark.long] * (place != number % len(PAIRS)))
        for number, case in enumerate(ENCODED)
        for place, pair in enumerate(PAIRS)
    ],
)
def test_an_encoded_stash_is_what_the_formulas_say(
    model: str,
    mesh: str,
    dropout: bool,
    seq_len: int,
    recompute: str,
    stash_dtype: str,
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = a_config(model, mesh, recompute, dropout=dropout, seq_len=seq_len)
    config.pipeline.stash_dtype, config.model.dtype = stash_dtype, dtype
    keys = 8 * config.microbatch_size  # of the masks that are drawn again, which the formulas leave out
    assert stashed_bytes(config, monkeypatch) == pytest.approx(LayerMemory.of(config, CPU).stash(), abs=keys)
