"""Llama's operators against autodiff, its sizes and memory, and what a trained model does after training.

That it trains as its reference does, on every kind of layout, is in `tests/train/layouts.py`.
"""

import copy
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.benchmarks.programs import make_program, temporary_bytes
from fiddlex.config import Config, MeshConfig, PipelineConfig
from fiddlex.config.overrides import replaced
from fiddlex.costs.sizes import num_parameters
from fiddlex.errors import CheckpointError, ConfigError
from fiddlex.hardware.topology import load_topology
from fiddlex.models.attention import attend
from fiddlex.models.context import Context
from fiddlex.models.operators import exact_gelu, gated_silu, rms_norm
from fiddlex.models.rotary import rotate
from fiddlex.planner.layouts import Problem, layouts
from fiddlex.train.inference.sampling import SamplingConfig
from fiddlex.train.run.checkpoints.checkpoint import Checkpoints
from fiddlex.train.trainer import Trainer
from tests import reference, reference_llama
from tests.costs.test_device_memory import predicted, temporaries


@pytest.fixture
def config(tiny_config: Config) -> Config:
    """On data=2 × pipe=2 × tensor=2, with four heads of queries for two of keys and values."""
    model, mesh, pipeline = tiny_config.model, tiny_config.mesh, tiny_config.pipeline
    model.family, model.num_layers, model.num_kv_heads, model.head_dim, model.ffn_size = "llama", 4, 2, 10, 48
    model.qk_norm, model.tied_embeddings, model.rope_scaling, model.rope_factor = True, False, "llama3", 2.0
    model.rope_base, model.rope_original_len = 100.0, 16
    mesh.data = mesh.pipe = mesh.tensor = pipeline.num_chunks = 2
    pipeline.schedule, pipeline.num_microbatches = "interleaved_1f1b", 4
    return tiny_config


def normal(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(sum(shape)), shape)


def agree(operator: Callable[..., jax.Array], formula: Callable[..., jax.Array], *arguments: jax.Array) -> None:
    """Checks an operator's values and gradients against those that autodiff finds for a formula."""
    value, backward = jax.vjp(operator, *arguments)
    expected, plain_backward = jax.vjp(formula, *arguments)
    np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)
    cotangent = normal(*value.shape) + 0.5
    for found, wanted in zip(backward(cotangent), plain_backward(cotangent), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_operators_have_the_gradients_of_their_formulas() -> None:
    x_BSNH, scale_H, angles = normal(2, 3, 2, 6), normal(6), (1.0, 0.5, 0.1)
    positions_BS = jnp.array([[0, 1, 2], [5, 6, 9]])

    def root_mean_square(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-3) * scale

    def turned(x: jax.Array) -> jax.Array:
        y = (x[..., :3] + 1j * x[..., 3:]) * jnp.exp(1j * positions_BS[:, :, None, None] * jnp.array(angles))
        return jnp.concatenate([y.real, y.imag], axis=-1)

    agree(lambda x, scale: rms_norm(x, scale, 1e-3), root_mean_square, x_BSNH, scale_H)
    agree(gated_silu, lambda gate, x: gate / (1 + jnp.exp(-gate)) * x, x_BSNH, normal(2, 3, 2, 6) + 1)
    agree(exact_gelu, lambda x: x * (1 + jax.lax.erf(x / 2**0.5)) / 2, x_BSNH)
    agree(lambda x: rotate(x, positions_BS, angles), turned, x_BSNH)


def test_queries_share_keys_as_if_each_had_a_copy() -> None:
    q_BSND, k_BSKD, v_BSKD = normal(2, 5, 6, 4), normal(2, 5, 3, 4), normal(2, 5, 3, 4) + 1
    context = Context(sequence_parallel=False)
    copies = (jnp.repeat(x, 2, axis=2) for x in (k_BSKD, v_BSKD))  # heads 0 and 1 of the queries share head 0
    expected = attend(q_BSND, *copies, context)
    np.testing.assert_allclose(attend(q_BSND, k_BSKD, v_BSKD, context), expected, rtol=1e-5, atol=1e-6)


def test_products_of_rotated_queries_and_keys_depend_on_the_distance_alone() -> None:
    q, k = normal(1, 1, 1, 6), normal(1, 1, 1, 6) + 1

    def score(query: int, key: int) -> float:
        at = (jnp.array([[position]]) for position in (query, key))
        turned = [rotate(x, position, (1.0, 0.3, 0.01)) for x, position in zip((q, k), at, strict=True)]
        return float(jnp.sum(turned[0] * turned[1]))

    assert score(7, 4) == pytest.approx(score(1007, 1004), rel=1e-3)
    assert score(7, 4) != pytest.approx(score(7, 5), rel=1e-2)


@pytest.mark.long
def test_a_trained_model_is_evaluated_sampled_and_restored_where_ranks_share_keys(
    config: Config, tmp_path: pathlib.Path
) -> None:
    trainer = Trainer(config)
    assert num_parameters(config) == sum(leaf.size for leaf in jax.tree.leaves(trainer.weights()))
    list(trainer.steps(2))
    with Checkpoints(tmp_path) as checkpoints:
        trainer.save(checkpoints)
    other = replaced(config, {"mesh.data": 1, "mesh.pipe": 1, "mesh.tensor": 4, "mesh.sequence_parallel": True})
    other = replaced(other, {"pipeline.schedule": "1f1b", "pipeline.num_chunks": 1, "pipeline.num_microbatches": 2})
    resumed = Trainer(other)
    with Checkpoints(tmp_path) as checkpoints:
        assert resumed.restore(checkpoints)
    for found, saved in zip(jax.tree.leaves(resumed.weights()), jax.tree.leaves(trainer.weights()), strict=True):
        np.testing.assert_array_equal(found, saved)
    expected = [record["loss"] for record in trainer.steps(2)]
    np.testing.assert_allclose([record["loss"] for record in resumed.steps(2)], expected, rtol=1e-5)
    assert resumed.evaluate()["eval_loss"] == pytest.approx(trainer.evaluate()["eval_loss"], rel=1e-5)

    weights, prompt = reference.unstack(resumed.weights()), list(b"import os\nimp")
    text = list(prompt)
    for _ in range(8):
        padded = np.zeros((1, 16), np.int32)
        window = text[-16:]
        padded[0, : len(window)] = window
        logits = reference_llama.logits_fn(weights, jnp.asarray(padded), None, other)
        text.append(int(logits[0, len(window) - 1, :256].argmax()))
    drawn = "".join(resumed.generate(bytes(prompt).decode(), 8, SamplingConfig(temperature=0)))
    assert drawn == bytes(text[len(prompt) :]).decode(errors="replace")


@pytest.mark.parametrize("tied", [pytest.param(True, marks=pytest.mark.long), False])
def test_memory_is_predicted(tied: bool, config: Config) -> None:
    config.model.hidden_size, config.model.seq_len, config.model.vocab_size = 128, 256, 512
    config.model.ffn_size, config.model.head_dim, config.model.tied_embeddings = 384, 0, tied
    config.mesh.data = 1
    program = make_program(config)
    assert temporaries(predicted(program.config)) == pytest.approx(temporary_bytes(program, program.step), rel=0.1)


def test_the_planner_tries_tensor_sizes_that_split_or_share_the_keys(config: Config) -> None:
    config.model.num_heads, config.model.num_kv_heads, config.model.dtype = 12, 4, "bfloat16"
    config.data.global_batch_size = 12
    problem = Problem(config, load_topology("a100_80"), num_devices=12)
    assert {layout.mesh.tensor for layout in layouts(problem)} == {
        1,
        2,
        4,
        12,
    }  # 3 and 6 neither divide 4 nor are multiples


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model.num_kv_heads": 3}, "model.num_heads=4 is not a multiple of model.num_kv_heads=3"),
        ({"model.num_kv_heads": 4, "model.num_heads": 12, "model.hidden_size": 36, "mesh.tensor": 3}, "num_kv_heads=4"),
        ({"model.head_dim": 7}, "model.head_dim=7 with model.family=llama: rotary positions turn pairs"),
        ({"model.rope_scaling": "yarn"}, "model.rope_scaling='yarn' is not one of none, linear, llama3"),
        ({"model.rope_scaling": "none"}, "model.rope_factor=2.0 with model.rope_scaling=none"),
        ({"model.rope_low_frequency": 4.0}, "model.rope_low_frequency=4 must be below"),
        ({"model.rope_base": 0.5}, "model.rope_base=0.5"),
        ({"model.rope_original_len": 0}, "model.rope_original_len=0"),
        ({"model.post_norm": True}, "model.post_norm=True with model.family=llama: this family does not have it"),
        ({"model.family": "gpt"}, "model.num_kv_heads=2 with model.family=gpt: this family does not have it. Use 0"),
    ],
)
def test_what_does_not_go_together_is_told(fields: dict[str, Any], message: str, config: Config) -> None:
    with pytest.raises(ConfigError) as error:
        replaced(config, fields).validate()
    assert message in str(error.value)


def test_weights_of_another_shape_are_not_taken(config: Config, tmp_path: pathlib.Path) -> None:
    from fiddlex.train import loop

    config.mesh, config.pipeline = MeshConfig(), PipelineConfig()
    config.train.num_steps = config.train.checkpoint_every = 1
    loop.train(copy.deepcopy(config), tmp_path / "first")
    config.model.num_kv_heads, config.model.rope_base = 4, 1000.0
    config.train.init_from = str(tmp_path / "first")
    with pytest.raises(CheckpointError) as error:
        loop.train(config, tmp_path / "second")
    assert "model.num_kv_heads is 4, was 2" in str(error.value)
    assert "model.rope_base is 1000.0, was 100.0" in str(error.value)
