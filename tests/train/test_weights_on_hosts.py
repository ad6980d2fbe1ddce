"""Runs whose weights come from the host chunk by chunk, in what the layouts of test_layouts.py do not show."""

import copy
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fiddlex.cluster.mesh import make_mesh
from fiddlex.config import Config, MeshConfig
from fiddlex.errors import ConfigError, NonFiniteError
from fiddlex.pipeline.executor import execute
from fiddlex.schedules.resolve import resolve
from fiddlex.train.step import flushed
from fiddlex.train.step.measures import measure
from fiddlex.train.step.program import Program
from fiddlex.train.trainer import Trainer


def streamed(config: Config, **changes: Any) -> Config:
    """The config with weights on the host; `layers`, `pipe`, `chunks` and `microbatches` may be given."""
    config = copy.deepcopy(config)
    config.model.num_layers, config.mesh.pipe = changes.get("layers", 6), changes.get("pipe", 2)
    config.pipeline.schedule, config.pipeline.num_chunks = "breadth_first", changes.get("chunks", 3)
    config.pipeline.num_microbatches = changes.get("microbatches", 4)
    config.pipeline.weights_memory, config.optimizer.offload = "host", True
    return config


def on_devices(config: Config) -> Config:
    """The same config with weights on the devices."""
    config = copy.deepcopy(config)
    config.pipeline.weights_memory = "device"
    return config


# The norm sums in another order, and a weight whose last bit differs may round to another bfloat16.
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 1e-4)])
def test_losses_evaluation_and_weights_are_those_of_weights_on_the_devices(
    dtype: str, tolerance: float, tiny_config: Config
) -> None:
    tiny_config.model.dtype, tiny_config.optimizer.clip_norm, tiny_config.data.eval_fraction = dtype, 0.5, 0.1
    config = streamed(tiny_config)
    config.mesh.data, config.optimizer.epsilon = 2, 1e-5  # or AdamW makes whole steps of the noise of keys' biases
    config.pipeline.stash_memory = "host"
    runs = [Trainer(each) for each in (config, on_devices(config))]
    records = [list(trainer.steps(3)) for trainer in runs]
    for ours, theirs in zip(*records, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=tolerance)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=tolerance)
    assert runs[0].evaluate()["eval_loss"] == pytest.approx(runs[1].evaluate()["eval_loss"], rel=tolerance)
    weights = [jax.tree.leaves(trainer.weights()) for trainer in runs]
    for ours, theirs in zip(*weights, strict=True):
        assert np.linalg.norm(ours - theirs) <= 10 * tolerance * np.linalg.norm(theirs)


def test_no_value_of_uninitialised_memory_reaches_a_result(
    tiny_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows travel in every period, needed or not; here all that nobody has written is NaN."""
    empty = lambda shape, dtype: jnp.full(shape, jnp.nan, dtype)  # noqa: E731
    expected = [record["loss"] for record in Trainer(streamed(tiny_config, microbatches=2)).steps(2)]
    monkeypatch.setattr(jax.lax, "empty", empty)
    monkeypatch.setattr(flushed, "execute", functools.partial(execute, fill=jnp.nan))
    found = [record["loss"] for record in Trainer(streamed(tiny_config, microbatches=2)).steps(2)]
    assert found == expected


def test_a_gradient_that_is_not_finite_is_named_by_its_layer(tiny_config: Config) -> None:
    config = streamed(tiny_config)
    config.optimizer.name, config.optimizer.learning_rate, config.optimizer.clip_norm = "sgd", 1e30, 0.0
    messages = []
    for each in (config, on_devices(config)):
        with pytest.raises(NonFiniteError) as error:
            list(Trainer(each).steps(4))
        messages.append(str(error.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("value", [3.0, np.inf, np.nan])
def test_norm_and_flags_of_gradients_are_the_same_wherever_they_are(value: float, tiny_config: Config) -> None:
    program = Program(streamed(tiny_config), make_mesh(MeshConfig(pipe=2)))
    shardings = program.layout.master_shardings(program.mesh)
    rng = np.random.default_rng(0)
    grads = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), program.layout.shapes)
    for leaf in jax.tree.leaves(grads["layers"]):
        leaf[1].flat[0] = value
    here = jax.tree.map(lambda x, sharding: jax.device_put(x, sharding.with_memory_kind("device")), grads, shardings)
    there = here | {"layers": jax.tree.map(jax.device_put, grads["layers"], shardings["layers"])}
    measured = jax.jit(lambda grads: measure(grads, program.layout.placement, program.mesh))
    (norm, flags), (expected_norm, expected) = measured(there), measured(here)
    np.testing.assert_allclose(norm, expected_norm, rtol=1e-6)
    chex.assert_trees_all_equal(flags, expected)
    assert any(map(np.any, jax.tree.leaves(flags))) == (not np.isfinite(value))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"pipeline.schedule": "interleaved_1f1b"},
            "pipeline.weights_memory=host with pipeline.schedule=interleaved_1f1b",
        ),
        (
            {"pipeline.num_chunks": 2},
            r"num_chunks=2: schedule breadth_first has 2 chunks on rank 0: a device holds the",
        ),
        (
            {"optimizer.offload": False},
            r"weights_memory=host with optimizer.offload=False: .* Set optimizer.offload=True",
        ),
        (
            {"pipeline.semantics": "2bw"},
            r"weights_memory=host with pipeline.semantics=2bw: .* several versions of them",
        ),
        (
            {"pipeline.semantics_schedule": "sync:0.5,2bw"},
            r"weights_memory=host with pipeline.semantics_schedule=sync:",
        ),
        ({"model.dtype": "float16"}, r"weights_memory=host with model.dtype=float16: .* Use model.dtype=bfloat16"),
        (
            {"train.sample_tokens": 8},
            r"weights_memory=host with train.sample_tokens=8: sampling keeps all weights on the",
        ),
        (
            {"pipeline.weights_memory": "hosts"},
            r"weights_memory='hosts' is not one of device, host. Did you mean 'host'",
        ),
    ],
)
def test_what_cannot_stream_is_refused(changes: dict[str, Any], message: str, tiny_config: Config) -> None:
    config = streamed(tiny_config)
    for path, value in changes.items():
        section, name = path.split(".")
        setattr(getattr(config, section), name, value)
    with pytest.raises(ConfigError, match=message):
        resolve(config.validate())
