"""What delayed weights promise besides the right weights in every layout (`test_layouts`)."""

import copy
import itertools
import pathlib
from typing import Any

import chex
import jax
import numpy as np
import pytest

from fiddlex.config import Config
from fiddlex.data import Loader
from fiddlex.errors import ConfigError, NonFiniteError
from fiddlex.train import loop
from fiddlex.train.run.checkpoints.checkpoint import Checkpoints
from fiddlex.train.run.transfer import weights as transfer
from fiddlex.train.step.unflushed import Unflushed
from fiddlex.train.trainer import Trainer, load_trainer
from tests import reference

TOLERANCE = 1e-5


@pytest.fixture
def config(tiny_config: Config) -> Config:
    """Two ranks and ten steps of 2BW."""
    tiny_config.mesh.pipe, tiny_config.pipeline.num_microbatches = 2, 2
    tiny_config.pipeline.semantics, tiny_config.train.num_steps = "2bw", 10
    tiny_config.optimizer.schedule, tiny_config.optimizer.learning_rate = "constant", 1e-3
    tiny_config.optimizer.clip_norm, tiny_config.optimizer.epsilon = 0.5, 1e-6  # see tests/train/test_layouts.py
    return tiny_config


def batches(trainer: Trainer, number: int) -> list[dict[str, np.ndarray]]:
    config = trainer.config
    loader = Loader(trainer.dataset.train, global_batch_size=config.data.global_batch_size, seed=0, vocab_size=257)
    return [loader.batch(step) for step in range(number)]


def test_losses_of_one_batch_over_and_over_are_those_of_the_weights_one_update_ago(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Loader.batch
    monkeypatch.setattr(Loader, "batch", lambda self, step: original(self, 0))
    trainer = Trainer(config)
    weights = [trainer.weights()]
    losses = []
    for _ in range(5):
        losses.append(trainer.record(trainer.dispatch())["loss"])
        weights.append(trainer.weights())
    batch = batches(trainer, 1)[0]
    of = [float(reference.gpt_loss_fn(reference.unstack(w), batch, None, config)) for w in weights]  # type: ignore[arg-type]
    np.testing.assert_allclose(losses, [of[0], of[0], of[1], of[2], of[3]], rtol=TOLERANCE)
    assert of[0] > of[1] > of[2] > of[3]


@pytest.mark.parametrize(
    ("schedule", "delays"),
    [
        pytest.param("sync:3,2bw", [0] * 3 + [1] * 9, marks=pytest.mark.long),
        # twelve steps, two beyond the end of the run
        pytest.param("2bw:0.7,sync", [1] * 7 + [0] * 5, marks=pytest.mark.long),
        ("sync:2,delay:3:4,2bw:2,sync", [0] * 2 + [3] * 4 + [1] * 2 + [0] * 4),
        ("2bw", [1] * 12),
    ],
)
def test_phases_of_a_run_lose_no_microbatch(schedule: str, delays: list[int], config: Config) -> None:
    config.pipeline.semantics, config.pipeline.semantics_schedule = "sync", schedule
    trainer = Trainer(config)
    initial, steps = trainer.weights(), 12
    expected = reference.train(
        config,
        initial,
        batches(trainer, steps),
        lambda step: reference.Delays(delays[step], (delays[step],) * 2, delays[step]),
    )
    records = list(trainer.steps(steps))
    np.testing.assert_allclose([r["loss"] for r in records], expected["losses"], rtol=TOLERANCE)
    np.testing.assert_allclose([r["grad_norm"] for r in records], expected["norms"], rtol=TOLERANCE)
    chex.assert_trees_all_close(
        reference.unstack(trainer.weights()), jax.tree.map(np.asarray, expected["weights"]), rtol=1e-4, atol=1e-6
    )


def test_evaluation_is_of_the_newest_weights_and_disturbs_nothing(config: Config) -> None:
    quiet, asked = Trainer(copy.deepcopy(config)), Trainer(config)
    losses = [record["loss"] for record in quiet.steps(6)]
    found = []
    for _ in range(6):
        found.append(asked.record(asked.dispatch())["loss"])
        evaluation = asked.evaluate()["eval_loss"]
    assert found == losses
    sync = copy.deepcopy(config)
    sync.pipeline.semantics = "sync"
    plain = Trainer(sync)
    plain._state = plain.state._replace(weights=asked.state.weights)
    assert plain.evaluate()["eval_loss"] == evaluation


def test_nothing_is_traced_twice_and_the_state_is_donated(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    chex.clear_trace_counter()
    monkeypatch.setattr(Unflushed, "gradients", chex.assert_max_traces(Unflushed.gradients, n=1))
    config.pipeline.semantics, config.pipeline.semantics_schedule = "sync", "sync:2,2bw:5,vertical_sync"
    trainer = Trainer(config)
    for _ in range(10):
        before = jax.tree.leaves(trainer.state)
        trainer.record(trainer.dispatch())
        assert all(leaf.is_deleted() for leaf in before if leaf.size)


@pytest.mark.parametrize("data", [1, 2])
def test_2bw_keeps_one_more_set_of_weights_and_no_second_set_of_gradient_sums(data: int, config: Config) -> None:
    config.mesh.data = data
    program = Trainer(config)._program
    state, layers = program.abstract_state, program.abstract_state.weights["layers"]
    versions = state.pipeline.versions.weights["layers"]
    assert sizes(versions) == 2 * sizes(layers)
    carry = state.pipeline.in_flight.carry
    assert sizes(carry.grads.layers) == data * sizes(layers)  # one on each replica
    assert carry.finished == ()


def sizes(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("semantics", "bw2", "pipeline.semantics: there are no semantics 'bw2'. Did you mean '2bw'"),
        ("semantics", "2BW", "there are no semantics '2BW'. Did you mean '2bw'"),
        (
            "semantics",
            "delay:1000",
            "'delay:1000' must be delay:K with K a number of updates, at most 999, as in delay:2",
        ),
        ("semantics", "sync:5,2bw", "names one kind of semantics; phases go into pipeline.semantics_schedule"),
        ("semantics_schedule", "2bw:0.5", "the last phase, '2bw:0.5', takes what is left and has no length"),
        ("semantics_schedule", "sync:20%,2bw", "the length '20%' is neither a number of steps nor a share such as 0.2"),
        ("semantics_schedule", "nonsense:0,2bw", "pipeline.semantics_schedule: there are no semantics 'nonsense'"),
        ("semantics_schedule", ":100,2bw", "':100' names no semantics"),
        ("semantics_schedule", "delay:2,sync", "'delay:2' has no length"),
        ("semantics_schedule", "auto,sync", "'auto' stands alone"),
        ("semantics_schedule", "AUTO", "write 'auto'"),
        ("semantics_schedule", "sync:0,2bw", "the phase 'sync:0' takes no step"),
        ("semantics_schedule", "sync,2bw", "'sync' has no length. Write each phase but the last with its length"),
        ("semantics_schedule", "sync:50,2bw", "its phases before the last take 50 of train.num_steps=10 steps"),
        ("num_microbatches", 1, "at least as many microbatches as ranks. Use pipeline.num_microbatches=2 or more"),
    ],
)
def test_what_cannot_be_had_is_told(field: str, value: Any, message: str, config: Config) -> None:
    if field == "semantics_schedule":
        config.pipeline.semantics = "sync"
    setattr(config.pipeline, field, value)
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        Trainer(config)


def test_one_kind_of_semantics_and_phases_at_once_are_refused(config: Config) -> None:
    config.pipeline.semantics_schedule = "sync:0.2,2bw"
    with pytest.raises(
        ConfigError, match=r"semantics=2bw and pipeline\.semantics_schedule='sync:0\.2,2bw': one run has"
    ):
        Trainer(config)


def test_a_run_of_sync_phases_alone_is_a_plain_run(config: Config) -> None:
    config.pipeline.semantics, config.pipeline.semantics_schedule = "sync", "sync:4,sync"
    assert not isinstance(Trainer(config)._program.source, Unflushed)


@pytest.mark.parametrize("semantics", ["sync", "2bw"])
def test_float16_leaves_out_updates_that_overflow_and_no_others(semantics: str, config: Config) -> None:
    """The scale comes down from far too high, changing nothing; from then on losses are those of float32, rounded."""
    config.pipeline.semantics, config.train.num_steps = semantics, 20
    config.model.dtype, config.optimizer.loss_scale, config.optimizer.loss_scale_window = "float16", 2.0**20, 6
    trainer = Trainer(config)
    initial = trainer.weights()
    records = []
    for _ in range(20):
        records.append(trainer.record(trainer.dispatch()))
        if all(record["grad_norm"] is None for record in records):
            chex.assert_trees_all_equal(trainer.weights(), initial)
    skipped = [record["grad_norm"] is None for record in records]
    first = skipped.index(False)
    assert first >= 2
    scales = [record["loss_scale"] for record in records]
    assert any(after > before for before, after in itertools.pairwise(scales))  # it grew again after six updates
    delay = int(semantics == "2bw")
    lag = reference.Delays(delay, (delay,) * 2, delay)
    taken = [step for step in range(first, 20) if not skipped[step]][:5]
    data = batches(trainer, 20)
    expected = reference.train(config, initial, [data[step] for step in taken], lambda step: lag)
    found = [records[step] for step in taken]
    np.testing.assert_allclose([record["loss"] for record in found], expected["losses"], rtol=2e-3)
    np.testing.assert_allclose([record["grad_norm"] for record in found], expected["norms"], rtol=2e-2)


def test_float16_skips_the_same_updates_whatever_the_layout(config: Config) -> None:
    """With more batches in flight on two ranks than on one, and a scale that is far too high at first."""
    config.model.dtype, config.optimizer.loss_scale, config.optimizer.loss_scale_window = "float16", 2.0**20, 6
    config.train.num_steps = 12
    alone = copy.deepcopy(config)
    alone.mesh.pipe = 1
    assert Trainer(alone)._program.source.max_batches < Trainer(config)._program.source.max_batches
    runs = [list(Trainer(each).steps(12)) for each in (alone, config)]
    assert [record["loss_scale"] for record in runs[0]] == [record["loss_scale"] for record in runs[1]]
    skipped = [[record["grad_norm"] is None for record in run] for run in runs]
    assert skipped[0] == skipped[1]
    assert 2 < sum(skipped[0]) < 10


def test_float16_resumes_with_its_scales(config: Config, tmp_path: pathlib.Path) -> None:
    config.model.dtype, config.optimizer.loss_scale, config.optimizer.loss_scale_window = "float16", 2.0**18, 3
    config.optimizer.warmup_steps = 20
    whole = Trainer(copy.deepcopy(config))
    records = list(whole.steps(10))
    losses = [record["loss"] for record in records]
    rates = [record["learning_rate"] for record in records if record["grad_norm"] is not None]
    assert len(rates) < 10
    np.testing.assert_allclose(rates, [config.optimizer.learning_rate * (k + 1) / 20 for k in range(len(rates))])
    first, second = Trainer(copy.deepcopy(config)), Trainer(config)
    found = []
    for _ in range(5):
        found.append(first.record(first.dispatch())["loss"])
    with Checkpoints(tmp_path) as checkpoints:
        first.save(checkpoints)
    with Checkpoints(tmp_path) as checkpoints:
        assert second.restore(checkpoints)
    found += [record["loss"] for record in second.steps(5)]
    assert found == losses
    chex.assert_trees_all_equal(second.weights(), whole.weights())
    chex.assert_trees_all_equal(second.state.scaling, whole.state.scaling)


def test_each_older_version_of_the_weights_is_saved_and_resumed_in_its_place(
    config: Config, tmp_path: pathlib.Path
) -> None:
    """With a delay of three the batches after a checkpoint are run with three older versions, each another."""
    config.pipeline.semantics, config.train.num_steps = "delay:3", 9
    whole, resumed = Trainer(copy.deepcopy(config)), Trainer(config)
    weights = []
    for _ in range(5):
        weights.append(whole.weights())
        whole.record(whole.dispatch())
    with Checkpoints(tmp_path) as checkpoints:
        whole.save(checkpoints)
    with Checkpoints(tmp_path) as checkpoints:
        assert resumed.restore(checkpoints)
    program = resumed._program
    older = program.source.saved(resumed.state).older
    assert list(older) == [f"weights_{age}_updates_ago" for age in (1, 2, 3)]
    for age, found in enumerate(older.values(), 1):
        chex.assert_trees_all_equal(transfer.whole(found, program.model, resumed.layout), weights[-age])
    losses = [record["loss"] for record in whole.steps(4)]
    assert [record["loss"] for record in resumed.steps(4)] == losses
    chex.assert_trees_all_equal(resumed.weights(), whole.weights())


def test_a_step_that_was_broken_off_is_taken_again(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [record["loss"] for record in Trainer(copy.deepcopy(config)).steps(4)]
    trainer = Trainer(config)
    found = [trainer.record(trainer.dispatch())["loss"] for _ in range(2)]

    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "_compiled", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trainer.dispatch()
    found += [trainer.record(trainer.dispatch())["loss"] for _ in range(2)]
    assert found == whole


def test_a_run_that_blew_up_goes_on_from_weights_that_are_good(config: Config, tmp_path: pathlib.Path) -> None:
    config.train.checkpoint_every = config.train.log_every = 1
    good = copy.deepcopy(config)
    config.optimizer.learning_rate, good.train.num_steps = 1e30, 4
    with pytest.raises(NonFiniteError):
        loop.train(config, tmp_path)
    assert loop.train(good, tmp_path).step == 4


def test_a_delayed_run_is_evaluated_with_fewer_microbatches_than_ranks(config: Config, tmp_path: pathlib.Path) -> None:
    config.train.num_steps = config.train.checkpoint_every = 2
    loop.train(config, tmp_path)

    def change(config: Config) -> Config:
        config.pipeline.num_microbatches = 1
        return config

    assert load_trainer(tmp_path, change).evaluate()["step"] == 2
