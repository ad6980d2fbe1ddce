"""Runs with an encoded stash: an exact forward pass, gradients near the exact ones, whatever else the run has."""

import copy
import pathlib
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fiddlex.config import Config
from fiddlex.errors import NonFiniteError
from fiddlex.pipeline.engine import Carry, Engine
from fiddlex.train import loop
from fiddlex.train.step.program import Program
from fiddlex.train.trainer import Trainer
from tests.train.layouts import case

# Of the change that one step makes. int8 has 7 bits, float8_e4m3fn 3 behind the first.
FARTHEST = {"int8": 0.02, "float8_e4m3fn": 0.06}
LAYOUTS = {
    "interleaved, sequence parallel, dropout": "2x2x2 gpt interleaved_1f1b 2 4 - sp none sgd zero1 dropout sync",
    "I and W, lists, 2BW": "1x2x2 mlm_nsp,post zb_h1 1 4 3,1 sp gelu,norms,masks sgd zero1 dropout 2bw",
    "shared heads, tensor parallel": "1x2x2 llama 1f1b 1 4 - - attention sgd - - sync",
    "in pieces, weight stashing": "1x2x2 gpt zb_h1 1 4 - sp norms sgd zero1 - stash",
}


def changed(config: Config, row: str, stash_dtype: str) -> tuple[float, Any]:
    """The loss of a layout's first step, and what the step adds to each weight."""
    config = copy.deepcopy(config)
    config.pipeline.stash_dtype = stash_dtype
    trainer = case(row).trainer(config)
    before = jax.device_get(trainer.weights())
    (record,) = trainer.steps(1)
    return record["loss"], jax.tree.map(np.subtract, jax.device_get(trainer.weights()), before)


def distance(first: Any, second: Any) -> float:
    norm = lambda tree: np.sqrt(sum(np.square(leaf, dtype=np.float64).sum() for leaf in jax.tree.leaves(tree)))  # noqa: E731
    return float(norm(jax.tree.map(np.subtract, first, second)) / norm(second))


@pytest.mark.parametrize(
    ("layout", "stash_dtype", "dtype"),
    [
        ("interleaved, sequence parallel, dropout", "int8", "float32"),
        ("I and W, lists, 2BW", "float8_e4m3fn", "float32"),
        ("shared heads, tensor parallel", "int8", "bfloat16"),
        ("in pieces, weight stashing", "int8", "float32"),
        pytest.param("interleaved, sequence parallel, dropout", "float8_e4m3fn", "float16", marks=pytest.mark.long),
        pytest.param("I and W, lists, 2BW", "int8", "bfloat16", marks=pytest.mark.long),
        pytest.param("shared heads, tensor parallel", "float8_e4m3fn", "float32", marks=pytest.mark.long),
        pytest.param("in pieces, weight stashing", "float8_e4m3fn", "float16", marks=pytest.mark.long),
    ],
)
def test_the_loss_is_exact_and_the_gradient_near(
    layout: str, stash_dtype: str, dtype: str, tiny_config: Config
) -> None:
    tiny_config.model.dtype = dtype
    tiny_config.mesh.collective_matmul = layout.startswith("in pieces")
    loss, change = changed(tiny_config, LAYOUTS[layout], "same")
    encoded_loss, encoded = changed(tiny_config, LAYOUTS[layout], stash_dtype)
    assert encoded_loss == loss
    assert 0 < distance(encoded, change) < FARTHEST[stash_dtype]


def test_a_split_backward_pass_decodes_what_a_whole_one_decodes(tiny_config: Config) -> None:
    whole, split = (
        changed(tiny_config, f"1x2x1 gpt {schedule} 1 4 - - gelu sgd - - sync", "int8")
        for schedule in ("1f1b", "zb_h1")
    )
    assert whole[0] == pytest.approx(split[0], rel=1e-6)
    assert distance(split[1], whole[1]) < 1e-5


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_what_the_engine_holds(schedule: str, tiny_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    carries: dict[str, Carry] = {}
    start = Engine.start
    tiny_config.pipeline.schedule, tiny_config.pipeline.num_microbatches, tiny_config.mesh.pipe = schedule, 4, 2
    tiny_config.model.dtype, tiny_config.model.dropout = "bfloat16", 0.1
    for stash_dtype in ("same", "int8"):
        tiny_config.pipeline.stash_dtype = stash_dtype

        def kept(engine: Engine, name: str = stash_dtype) -> Carry:
            carries[name] = start(engine)
            return carries[name]

        monkeypatch.setattr(Engine, "start", kept)
        trainer = Trainer(tiny_config)
        Program(trainer.config, trainer.mesh).lower()
    same, encoded = carries["same"], carries["int8"]
    numbers: dict[str, list[str]] = {
        name: [leaf.dtype.name for leaf in carry.stash if jnp.issubdtype(leaf.dtype, jnp.number)]
        for name, carry in carries.items()
    }
    activations = numbers["same"].count("bfloat16") - 1  # all but the layer's input
    assert numbers["int8"].count("bfloat16") == 1
    assert numbers["int8"].count("int8") == numbers["int8"].count("float32") == activations > 5
    assert numbers["int8"].count("uint8") == numbers["same"].count("uint8") > 0  # masks
    chex.assert_trees_all_equal_shapes_and_dtypes(same._replace(stash=[]), encoded._replace(stash=[]))


def test_a_gradient_that_is_not_finite_ends_the_run(tiny_config: Config) -> None:
    tiny_config.model.dtype, tiny_config.pipeline.stash_dtype = "float32", "int8"
    tiny_config.optimizer.name, tiny_config.optimizer.learning_rate, tiny_config.optimizer.clip_norm = "sgd", 1e30, 0.0
    with pytest.raises(NonFiniteError):
        list(Trainer(tiny_config).steps(4))


def test_a_run_resumes_with_another_type(tiny_config: Config, tmp_path: pathlib.Path) -> None:
    tiny_config.train.num_steps = tiny_config.train.checkpoint_every = 2
    loop.train(tiny_config, tmp_path)
    tiny_config.train.num_steps, tiny_config.pipeline.stash_dtype = 4, "int8"
    loop.train(tiny_config, tmp_path)
    lines = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8")
    assert '"step": 4' in lines
