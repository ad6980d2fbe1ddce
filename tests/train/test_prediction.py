"""Predicted weights: resume, phases, memory, overflow, stability, refusals; the numbers are in `test_layouts`."""

import copy
import pathlib
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.stability import largest_stable, predictions
from fiddlex.config import Config, OptimizerConfig
from fiddlex.config.unused import reset_unused
from fiddlex.data import Loader
from fiddlex.errors import ConfigError
from fiddlex.schedules.prediction import stage_factors
from fiddlex.schedules.semantics import make_semantics
from fiddlex.train.run.checkpoints.checkpoint import Checkpoints
from fiddlex.train.step.blockwise import Block
from fiddlex.train.step.optimizer import make_optimizer
from fiddlex.train.step.unflushed import Unflushed
from fiddlex.train.step.versions import predicted
from fiddlex.train.trainer import Trainer, load_trainer
from tests import reference

TOLERANCE = 1e-5


@pytest.fixture
def config(tiny_config: Config) -> Config:
    """Two ranks and ten steps of 2BW with predicted weights."""
    tiny_config.mesh.pipe, tiny_config.pipeline.num_microbatches = 2, 2
    tiny_config.pipeline.semantics, tiny_config.train.num_steps = "2bw", 10
    tiny_config.pipeline.prediction = "extrapolate"
    tiny_config.optimizer.schedule, tiny_config.optimizer.learning_rate = "constant", 1e-2
    tiny_config.optimizer.clip_norm, tiny_config.optimizer.epsilon = 0.5, 1e-5
    return tiny_config


@pytest.mark.parametrize(
    ("semantics", "prediction", "order", "optimizer", "dtype"),
    [
        ("2bw", "extrapolate", 2, "adamw", "float32"),
        pytest.param("stash", "momentum", 2, "muon", "float32", marks=pytest.mark.long),
        pytest.param("delay:2", "extrapolate", 1, "nadamw", "bfloat16", marks=pytest.mark.long),
    ],
)
def test_a_resumed_run_goes_on_bit_for_bit(
    semantics: str, prediction: str, order: int, optimizer: str, dtype: str, config: Config, tmp_path: pathlib.Path
) -> None:
    config.mesh.data, config.model.dtype, config.optimizer.name = 2, dtype, optimizer
    config.pipeline.semantics, config.pipeline.prediction = semantics, prediction
    config.pipeline.prediction_order = order
    whole, resumed = Trainer(copy.deepcopy(config)), Trainer(config)
    for _ in range(5):
        whole.record(whole.dispatch())
    with Checkpoints(tmp_path) as checkpoints:
        whole.save(checkpoints)
    with Checkpoints(tmp_path) as checkpoints:
        assert resumed.restore(checkpoints)
    losses = [record["loss"] for record in whole.steps(5)]
    assert [record["loss"] for record in resumed.steps(5)] == losses
    chex.assert_trees_all_equal(resumed.weights(), whole.weights())


def test_phases_predict_as_far_as_their_own_delay(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve steps, the last two beyond the end of the run, in one program that is traced once."""
    chex.clear_trace_counter()
    monkeypatch.setattr(Unflushed, "gradients", chex.assert_max_traces(Unflushed.gradients, n=1))
    config.pipeline.semantics, config.pipeline.semantics_schedule = "sync", "sync:2,stash:3,2bw:2,sync"
    config.pipeline.prediction_order = 2
    config.optimizer.learning_rate = 3e-3  # at 1e-2, rounding errors of twelve steps can grow beyond the tolerance
    delays = [reference.Delays(0, (0, 0), 0)] * 2 + [reference.Delays(1, (1, 0), 0)] * 3
    delays += [reference.Delays(1, (1, 1), 1)] * 2 + [reference.Delays(0, (0, 0), 0)] * 5
    trainer = Trainer(config)
    loader = Loader(trainer.dataset.train, global_batch_size=config.data.global_batch_size, seed=0, vocab_size=257)
    batches = [loader.batch(step) for step in range(12)]
    expected = reference.train(config, trainer.weights(), batches, delays.__getitem__)
    records = list(trainer.steps(12))
    np.testing.assert_allclose([r["loss"] for r in records], expected["losses"], rtol=TOLERANCE)
    np.testing.assert_allclose([r["grad_norm"] for r in records], expected["norms"], rtol=TOLERANCE)


@pytest.mark.long
@pytest.mark.parametrize("data", [1, 2])
def test_the_first_order_keeps_nothing_more_between_steps_and_the_second_one_set(data: int, config: Config) -> None:
    config.mesh.data = data

    def compiled_bytes(prediction: str, order: int) -> tuple[int, int]:
        config.pipeline.prediction, config.pipeline.prediction_order = prediction, order
        trainer = Trainer(copy.deepcopy(config))
        analysis = trainer._program.lower().compile().memory_analysis()
        weights = sum(
            4 * np.prod(x.sharding.shard_shape(x.shape))
            for x in jax.tree.leaves(trainer._program.abstract_state.weights)
        )
        return analysis.alias_size_in_bytes, int(weights)

    none, weights = compiled_bytes("none", 1)
    assert compiled_bytes("extrapolate", 1)[0] == none
    assert compiled_bytes("momentum", 1)[0] == none
    assert compiled_bytes("momentum", 2)[0] == none
    assert compiled_bytes("extrapolate", 2)[0] == none + weights


@pytest.mark.parametrize("prediction", ["extrapolate", pytest.param("momentum", marks=pytest.mark.long)])
def test_a_step_that_overflows_repeats_the_version(prediction: str, config: Config) -> None:
    config.model.dtype, config.optimizer.loss_scale = "float16", 2.0**20
    config.pipeline.prediction, config.pipeline.prediction_order = prediction, 2
    trainer = Trainer(config)
    kept, skipped = 0, 0
    for _ in range(10):
        before = jax.tree.map(np.asarray, trainer.state.pipeline.versions)
        newest = trainer.step % 2
        record = trainer.record(trainer.dispatch())
        after = trainer.state.pipeline.versions
        if record["grad_norm"] is not None:
            kept += 1
            continue
        skipped += 1
        chex.assert_trees_all_equal(
            jax.tree.map(lambda x, new=1 - newest: x[new], after.weights),
            jax.tree.map(lambda x, old=newest: x[old], before.weights),
        )
        chex.assert_trees_all_equal(after.last_update, before.last_update)
    assert kept > 0
    assert skipped > 0


def test_what_is_saved_and_evaluated_are_the_true_weights(config: Config, tmp_path: pathlib.Path) -> None:
    from fiddlex.train import loop

    config.train.checkpoint_every = config.train.eval_every = 10
    outcome = loop.train(config, tmp_path)
    assert outcome.evaluation is not None
    loaded = load_trainer(tmp_path)
    assert loaded.evaluate()["eval_loss"] == pytest.approx(outcome.evaluation["eval_loss"], rel=1e-6)
    trainer = Trainer(config)
    list(trainer.steps(10))
    chex.assert_trees_all_equal(loaded.weights(), trainer.weights())
    newest = jax.tree.leaves(trainer.state.pipeline.versions.weights)[0][0]
    assert np.abs(newest - jax.tree.leaves(trainer.state.weights)[0]).max() > 1e-4  # and not the predicted ones


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"pipeline.semantics": "sync"},
            "prediction=extrapolate with semantics sync: every batch runs with the newest",
        ),
        (
            {"pipeline.semantics": "sync", "pipeline.semantics_schedule": "sync:4,delay:0"},
            "with semantics sync, delay:0: every batch runs with the newest weights",
        ),
        (
            {"pipeline.prediction": "momentum", "optimizer.name": "adafactor"},
            "prediction=momentum and pipeline.prediction_order=1 with optimizer.name=adafactor: no momentum of "
            "this optimizer is known, from which the next update could be predicted. Use another optimizer, or use",
        ),
        (
            {"pipeline.prediction_order": 2, "optimizer.name": "sgd", "optimizer.momentum": 0.0},
            "prediction_order=2 with optimizer.name=sgd and optimizer.momentum=0: no momentum of this optimizer is "
            "known, from which the next update could be predicted. Set optimizer.momentum above 0, or use",
        ),
        ({"optimizer.offload": True}, "optimizer.offload=true with pipeline.prediction=extrapolate: a prediction of"),
        (
            {"pipeline.prediction": "none", "pipeline.prediction_scale": 1.4},
            "with pipeline.prediction=none: it changes nothing",
        ),
        ({"pipeline.prediction": "extrapolat"}, "Did you mean 'extrapolate'?"),
        ({"pipeline.prediction_order": 3}, "pipeline.prediction_order=3 must be at least 1 and at most 2"),
        ({"pipeline.prediction_scale": 0.0}, "pipeline.prediction_scale=0.0 must be greater than 0 and at most 10"),
        ({"pipeline.prediction_scale": float("nan")}, "pipeline.prediction_scale=nan must be greater than 0"),
    ],
)
def test_what_cannot_be_predicted_is_told(changes: dict[str, Any], message: str, config: Config) -> None:
    for path, value in changes.items():
        section, _, name = path.partition(".")
        setattr(getattr(config, section), name, value)
    reset_unused(config, by=[path for path in changes if path != "pipeline.prediction"])
    with pytest.raises(ConfigError) as raised:
        Trainer(config)
    assert message in str(raised.value)


@pytest.mark.parametrize("momentum", [0.9, 0.95])
@pytest.mark.parametrize(
    ("prediction", "order", "scale", "named"),
    [
        ("none", 1, 1.0, "W(t − 1): `none`"),
        ("extrapolate", 1, 1.0, "`extrapolate`"),
        ("extrapolate", 1, 1.4, "`extrapolate`, scale 1.4"),
        ("extrapolate", 2, 1.0, "order 2 of either"),
        ("momentum", 1, 1.0, "`momentum`"),
        ("momentum", 2, 1.0, "order 2 of either"),
    ],
)
def test_the_code_is_stable_as_far_as_the_roots_say(
    prediction: str, order: int, scale: float, named: str, momentum: float
) -> None:
    """Gradient descent with momentum on quadratics, one for each weight, by the code and by characteristic roots.

    The mean of gradients has the weight 1 − momentum, as in Adam, so sgd's learning rate is that share of η.
    """
    config = Config()
    config.optimizer = OptimizerConfig("sgd", learning_rate=1 - momentum, schedule="constant", momentum=momentum)
    config.pipeline.semantics = "2bw"
    config.pipeline.prediction, config.pipeline.prediction_order = prediction, order
    config.pipeline.prediction_scale = scale
    bound = largest_stable(momentum, predictions(momentum)[named])

    def by_code(products: np.ndarray) -> np.ndarray:
        start = {"embedding": jnp.ones(len(products), jnp.float32)}
        optimizer = make_optimizer(
            config.optimizer, num_steps=1, blocks={"embedding": Block(stacked=False, decay=False, padding=1.0)}
        )
        semantics = make_semantics("2bw", num_stages=1, batch_size=1)
        factors = jnp.asarray(stage_factors(config, semantics))[:, 0] if prediction != "none" else None

        def step(carry: Any, _: None) -> tuple[Any, jax.Array]:
            weights, state, version, next_version, last = carry
            grads = jax.tree.map(lambda w: jnp.asarray(products, jnp.float32) * w, version)
            update, state = optimizer.update(grads, state, weights)
            weights = optax.apply_updates(weights, update)
            made = weights
            if factors is not None:
                updates = [update, last][:order]
                if prediction == "momentum":
                    expected = grads if order == 2 else jax.tree.map(jnp.zeros_like, grads)
                    updates = [optimizer.update(expected, state, weights)[0]]
                made = predicted(weights, updates, factors, factors)
            return (weights, state, next_version, made, update), jnp.abs(weights["embedding"])

        nothing = jax.tree.map(jnp.zeros_like, start)
        carry = (start, optimizer.init(start), start, start, nothing)
        run = jax.jit(lambda carry: jax.lax.scan(step, carry, length=3000))
        return np.asarray(run(carry)[1])[-300:].max(axis=0) < 1

    products = np.linspace(0.5 * bound, 1.5 * bound, 500)
    assert products[np.argmin(by_code(products))] == pytest.approx(bound, rel=0.01)


@pytest.mark.parametrize("name", ["sgd", "adamw", "lion", "muon"])
def test_error_feedback_is_a_change_of_variables(name: str) -> None:
    """Correcting a delayed update by its difference from the one before is predicting weights with the scale 1.

    With the optimizer's update u_t for the gradient at x_(t − 1), the correction moves x_(t + 1) = x_t + 2 u_t −
    u_(t − 1). The weights W_t with W_(t + 1) = W_t + u_t then have x_t = W_t + (W_t − W_(t − 1)).
    """
    momentum = 0.9
    rule: optax.GradientTransformation = {
        "sgd": optax.sgd(0.05, momentum),
        "adamw": optax.adamw(0.05, momentum, weight_decay=0.0),
        "lion": optax.lion(0.05, momentum, weight_decay=0.0),
        "muon": optax.contrib.muon(0.05, beta=momentum),
    }[name]
    random = np.random.default_rng(0)
    inputs, start = jnp.asarray(random.normal(size=(64, 6))), jnp.asarray(random.normal(size=(6, 4)))

    @jax.jit
    def gradient(w: jax.Array) -> jax.Array:
        return jax.grad(lambda w: jnp.mean(jnp.square(jnp.tanh(inputs @ w) - 0.3)))(w)

    corrected, before, last, state = start, start, jnp.zeros_like(start), rule.init(start)
    weights, versions, state_of_weights = start, [start, start], rule.init(start)
    for _ in range(30):
        update, state = rule.update(gradient(before), state, corrected)
        corrected, before, last = corrected + 2 * update - last, corrected, update
        update, state_of_weights = rule.update(gradient(versions[-2]), state_of_weights, weights)
        weights = weights + update
        versions.append(weights + update)
        np.testing.assert_allclose(versions[-1], corrected, rtol=1e-4, atol=1e-5)
    assert np.abs(corrected - weights).max() > 1e-3
