"""Steps that are not finite, and spikes, are skipped or rolled back, as if the run never had their batch."""

import copy
import json
import logging
import pathlib
import re
from typing import Any

import jax
import numpy as np
import pytest

from fiddlex.config import Config, OptimizerConfig
from fiddlex.data import Batch, Loader
from fiddlex.errors import CheckpointError, ConfigError, FaultError, NonFiniteError, SpikeError
from fiddlex.train import loop
from fiddlex.train.run import workdir as workdirs
from fiddlex.train.run.checkpoints.checkpoint import Checkpoints
from fiddlex.train.trainer import Trainer, load_trainer
from tests.programs import ROOT
from tests.train.test_resume import final_state, interrupted_run, records

NONFINITE, SPIKE = 6, 33  # numbers of the batches that are poisoned
STEPS = {NONFINITE: 10, SPIKE: 36}


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """What a run logs."""
    monkeypatch.setattr(logging.getLogger("fiddlex"), "propagate", True)
    caplog.set_level(logging.INFO)
    return caplog


@pytest.fixture
def config(tiny_config: Config) -> Config:
    """SGD at a constant rate without dropout, so that a run without one of its batches can be compared.

    The text is the same with every Python, since it decides which losses and gradients count as spikes.
    """
    tiny_config.data.source = f"text:{ROOT / 'LICENSE'}"
    tiny_config.mesh.data = 2
    tiny_config.pipeline.num_microbatches = 2
    tiny_config.optimizer.name, tiny_config.optimizer.schedule = "sgd", "constant"
    tiny_config.optimizer.learning_rate, tiny_config.optimizer.momentum = 0.3, 0.5
    tiny_config.train.num_steps = STEPS[NONFINITE]
    tiny_config.train.checkpoint_every = 2
    return tiny_config


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Numbers of batches, to be filled by the test, whose loss shall not be finite; SPIKE's is only high."""
    numbers: set[int] = set()
    original = Loader.batch

    def batch(self: Loader, number: int) -> Batch:
        made = original(self, number)
        if number in numbers:
            made["weights"] = np.full_like(made["weights"], np.nan)
            if number == SPIKE:  # tokens that do not occur in the text
                made |= {"weights": np.ones_like(made["weights"]), "targets": np.full_like(made["targets"], 256)}
        return made

    monkeypatch.setattr(Loader, "batch", batch)
    return numbers


def weights_without(config: Config, batch: int, *, steps: int) -> list[np.ndarray]:
    """The weights after `steps` steps of a run that never sees a batch."""
    trainer = Trainer(copy.deepcopy(config))
    trainer.leave_out([batch])
    for _ in trainer.steps(steps):
        pass
    return jax.tree.leaves(trainer.weights())


def trained(workdir: pathlib.Path, config: Config) -> list[np.ndarray]:
    trainer = Trainer(copy.deepcopy(config))
    with Checkpoints(workdir) as checkpoints:
        assert trainer.restore(checkpoints)
    assert trainer.step == config.train.num_steps
    return jax.tree.leaves(trainer.weights())


def faults(workdir: pathlib.Path) -> list[dict[str, Any]]:
    return json.loads((workdir / "faults.json").read_text())  # type: ignore[no-any-return]


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("batch", "action"),
    [
        (SPIKE, "skip"),
        pytest.param(NONFINITE, "rollback", marks=LONG),
        pytest.param(NONFINITE, "skip", marks=LONG),
        pytest.param(SPIKE, "rollback", marks=LONG),
    ],
)
def test_a_run_with_a_bad_batch_equals_one_without_it(
    batch: int,
    action: str,
    config: Config,
    tmp_path: pathlib.Path,
    poison: set[int],
    log: pytest.LogCaptureFixture,
) -> None:
    poison.add(batch)
    config.train.num_steps = STEPS[batch]
    config.train.log_every = 5 if action == "skip" else 1
    if batch == SPIKE:
        config.train.on_spike, config.train.spike_bound = action, 1.5
    else:
        config.train.on_nonfinite = action
    outcome = loop.train(config, tmp_path)
    assert outcome.step == config.train.num_steps
    assert sum("the train step" in line for line in log.messages) == 1
    kind = "spike" if batch == SPIKE else "nonfinite"
    assert faults(tmp_path) == [{"step": batch + 1, "batch": batch, "kind": kind, "action": action}]
    found = records(tmp_path)
    steps = set(range(config.train.log_every, STEPS[batch] + 1, config.train.log_every))
    assert [record["step"] for record in found] == sorted(steps | {STEPS[batch], batch + 1})
    what = "not finite: loss nan" if batch == NONFINITE else r"a spike: loss \d.*, usually \d.*; gradient norm \d"
    told = [line for line in log.messages if re.match(f"Step {batch + 1} is skipped, since it is {what}", line)]
    assert bool(told) == (action == "skip")
    skipped = [record["step"] for record in found if "skipped" in record]
    assert skipped == ([batch + 1] if action == "skip" else [])
    steps = config.train.num_steps - (action == "skip")  # a skipped step updates nothing
    for got, expected in zip(trained(tmp_path, config), weights_without(config, batch, steps=steps), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("action", "after"),
    [
        ("rollback", 8),
        pytest.param("rollback", 5, marks=LONG),
        pytest.param("skip", 5, marks=LONG),
        pytest.param("skip", 8, marks=LONG),
    ],
)
def test_a_resumed_run_finds_the_same_faults(
    after: int, action: str, config: Config, tmp_path: pathlib.Path, poison: set[int]
) -> None:
    poison.add(NONFINITE)
    config.optimizer.name, config.optimizer.momentum = "adamw", OptimizerConfig().momentum
    config.train.on_nonfinite = action
    config.optimizer.learning_rate = 1e-3
    loop.train(config, tmp_path / "whole")
    interrupted_run(config, tmp_path / "parts", after=after)
    loop.train(config, tmp_path / "parts")
    assert faults(tmp_path / "parts") == faults(tmp_path / "whole")
    assert records(tmp_path / "parts") == records(tmp_path / "whole")
    for a, b in zip(*(final_state(tmp_path / name, config) for name in ("parts", "whole")), strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.long
@pytest.mark.parametrize("semantics", ["2bw", "stash"])
@pytest.mark.parametrize("action", ["skip", "rollback"])
def test_with_several_batches_in_flight_no_weight_is_lost(
    action: str, semantics: str, config: Config, tmp_path: pathlib.Path, poison: set[int]
) -> None:
    config.mesh.pipe, config.pipeline.semantics = 2, semantics
    config.train.on_nonfinite = action
    poison.add(NONFINITE)
    assert loop.train(config, tmp_path).step == config.train.num_steps
    assert [fault["batch"] for fault in faults(tmp_path)] == [NONFINITE]
    assert all(np.isfinite(each).all() for each in trained(tmp_path, config))
    if action == "rollback":
        expected = weights_without(config, NONFINITE, steps=config.train.num_steps)
        for got, each in zip(trained(tmp_path, config), expected, strict=True):
            np.testing.assert_allclose(got, each, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("action", "checkpoint_every", "step", "kept"),
    [
        ("skip", 100, 7, 8),  # step 8 is good, and shows that the weights are
        pytest.param("skip", 1, 7, 8, marks=LONG),
        pytest.param("rollback", 2, 5, 2, marks=LONG),
    ],
)
def test_faults_are_bounded_in_number_and_no_good_step_is_lost(
    action: str, checkpoint_every: int, step: int, kept: int, config: Config, tmp_path: pathlib.Path, poison: set[int]
) -> None:
    poison.update({3, 4, 6})
    config.train.on_nonfinite, config.train.checkpoint_every = action, checkpoint_every
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    config.train.max_faults = 3
    loop.train(config, whole)
    config.train.max_faults = 2
    taken = []
    for _ in range(2):  # the second start ends at once
        with pytest.raises(FaultError) as raised:
            loop.train(config, parts)
        assert str(raised.value) == (
            f"Step {step} is fault number 3 of this run ({parts}/faults.json), and train.max_faults=2. "
            f"{'The run ended after step 8, which tells whether the weights are good. ' * (action == 'skip')}Look for "
            "the cause, such as bad data, too high a learning rate or a bad device. Then set train.max_faults higher: "
            f"the same command with it goes on from the last good checkpoint, {parts}/checkpoints/{kept}."
        )
        assert Checkpoints(parts).steps()[-1] == kept
        taken.append(records(parts))
    assert taken[0][:kept] == taken[1]
    config.train.max_faults = 3
    assert loop.train(config, parts).step == config.train.num_steps
    assert records(parts) == records(whole)
    assert faults(parts) == faults(whole)
    for a, b in zip(*(final_state(each, config) for each in (parts, whole)), strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("best", [4, 8])
def test_a_rollback_keeps_the_best_weights_or_makes_them_again(
    best: int, config: Config, tmp_path: pathlib.Path, poison: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 9 is bad, and the checkpoint of step 8 may be to blame, so the run goes back to step 6."""
    original = Trainer.evaluate

    def evaluate(self: Trainer, **arguments: Any) -> dict[str, Any]:
        return {**original(self, **arguments), "eval_loss": 1.0 + abs(self.step - best)}

    monkeypatch.setattr(Trainer, "evaluate", evaluate)
    poison.add(8)
    config.train.on_nonfinite, config.train.eval_every, config.train.patience = "rollback", 4, 9
    outcome = loop.train(config, tmp_path)
    assert outcome.evaluation is not None
    assert outcome.evaluation["step"] == best
    assert [path.name for path in (tmp_path / "best").iterdir() if path.is_dir()] == [str(best)]
    moved = [path.name.partition("-")[0] for path in (tmp_path / "damaged_checkpoints").iterdir()]
    assert moved == ["8"] * (1 + (best == 8))  # the checkpoint, and the best weights if they are made again
    expected = weights_without(config, 8, steps=best)
    for got, each in zip(jax.tree.leaves(load_trainer(tmp_path).weights()), expected, strict=True):
        np.testing.assert_array_equal(got, each)


@pytest.mark.parametrize(
    ("num_steps", "other", "saved"),
    [
        (STEPS[SPIKE], None, 35),  # step 35 is good, and shows that the weights are
        pytest.param(SPIKE + 1, None, 34, marks=LONG),  # the spike is the last step
        (STEPS[SPIKE], SPIKE + 1, None),  # step 35 is not finite
    ],
)
def test_a_spike_that_ends_the_run_loses_no_good_step(
    num_steps: int, other: int | None, saved: int | None, config: Config, tmp_path: pathlib.Path, poison: set[int]
) -> None:
    config.train.num_steps, config.train.checkpoint_every = num_steps, 32
    config.train.spike_bound, config.train.on_spike = 1.5, "skip"
    poison.add(SPIKE)
    loop.train(config, tmp_path / "whole")
    poison.update({other} if other else ())
    config.train.on_spike = "stop"
    after = "nothing, since step 35 is not finite: the weights may be to blame for both"
    text = (
        r"^Step 34 is a spike: loss .*, usually .*; gradient norm .*; train\.spike_bound=1\.5\. It did not change the "
        rf"weights\. The run has saved {f'step {saved}, without an update by step 34' if saved else after}\."
        r"\nA lower optimizer\.learning_rate, a longer optimizer\.warmup_steps or optimizer\.clip_norm=1\.0 "
        r"often help\. A higher train\.spike_bound allows such steps\. train\.on_spike=skip goes on without the update "
        r"of such a step\. train\.on_spike=rollback goes back to the last good checkpoint and leaves the batch out\. "
        rf"The same command with such a change goes on from the last good checkpoint, .*/checkpoints/{saved or 32}\.$"
    )
    with pytest.raises(SpikeError, match=text):
        loop.train(config, tmp_path / "parts")
    poison.discard(other)
    config.train.on_spike = "skip"
    assert loop.train(config, tmp_path / "parts").step == num_steps
    assert faults(tmp_path / "parts") == faults(tmp_path / "whole")
    for a, b in zip(*(final_state(tmp_path / name, config) for name in ("parts", "whole")), strict=True):
        assert a.tobytes() == b.tobytes()


def test_a_rollback_without_an_earlier_checkpoint(
    config: Config, tmp_path: pathlib.Path, poison: set[int], caplog: pytest.LogCaptureFixture
) -> None:
    poison.add(0)
    config.train.on_nonfinite = "rollback"
    text = r"Step 1 is not finite(.|\n)*no earlier checkpoint to go back to\. .* or choose train\.on_nonfinite=skip\."
    with pytest.raises(FaultError, match=text):
        loop.train(config, tmp_path)
    assert "Step 1 is not finite" not in caplog.text  # the error says it


def test_a_rollback_to_weights_alone_starts_the_optimizer_afresh(
    config: Config, tmp_path: pathlib.Path, poison: set[int]
) -> None:
    """As in a workdir that `fiddlex convert` has made, whose checkpoint is that of step 0."""
    config.optimizer.name, config.optimizer.momentum = "adamw", OptimizerConfig().momentum
    config.train.on_nonfinite, config.train.checkpoint_every = "rollback", 100
    trainer = Trainer(copy.deepcopy(config))
    with workdirs.claimed(tmp_path, config):
        workdirs.write_config(tmp_path, config, schedule=trainer.layout.pipeline.lowered.schedule)
    with Checkpoints(tmp_path) as checkpoints:
        trainer.save(checkpoints, weights_only=True)
    poison.add(NONFINITE)
    loop.train(config, tmp_path)
    assert [fault["batch"] for fault in faults(tmp_path)] == [NONFINITE]
    expected = weights_without(config, NONFINITE, steps=config.train.num_steps)
    for got, each in zip(trained(tmp_path, config), expected, strict=True):
        np.testing.assert_array_equal(got, each)


@pytest.mark.parametrize(("every", "keep_last", "message"), [(1, 2, "at least 3"), ("auto", 2, "at least 3")])
def test_a_rollback_that_might_find_no_good_checkpoint_is_refused(
    every: int | str, keep_last: int, message: str, config: Config, tmp_path: pathlib.Path
) -> None:
    config.mesh.data, config.mesh.pipe, config.pipeline.semantics = 1, 2, "2bw"
    config.train.on_nonfinite, config.train.keep_last, config.train.checkpoint_every = "rollback", keep_last, every
    with pytest.raises(ConfigError, match=f"since steps compute with weights up to 1 update old(.|\n)*{message}"):
        loop.train(config, tmp_path)


def test_too_many_faults_at_the_end_are_an_error(config: Config, tmp_path: pathlib.Path, poison: set[int]) -> None:
    poison.update({NONFINITE, config.train.num_steps - 1})
    config.train.on_nonfinite, config.train.max_faults = "skip", 1
    with pytest.raises(FaultError, match=r"Step 10 is fault number 2 of this run .*max_faults=1\. Look for the cause"):
        loop.train(config, tmp_path)


def test_without_faults_the_checks_change_nothing(config: Config) -> None:
    plain = [record["loss"] for record in Trainer(copy.deepcopy(config)).steps(4)]
    config.train.on_nonfinite, config.train.spike_bound = "skip", 5.0
    assert [record["loss"] for record in Trainer(config).steps(4)] == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize(
    "text",
    [
        "[",
        "{}",
        '[{"step": 1}]',
        '{"a": 1}',
        '[{"step": "1", "batch": 0, "kind": "spike", "action": "skip"}]',
        '[{"step": 1, "batch": -5, "kind": "spike", "action": "skip"}]',
        '[{"step": 1, "batch": 0, "kind": "spike", "action": "foo"}]',
        str([{"step": 1, "batch": 0, "kind": "spike", "action": "rollback"}] * 2).replace("'", '"'),
    ],
)
def test_a_damaged_list_of_faults(text: str, config: Config, tmp_path: pathlib.Path) -> None:
    (tmp_path / "faults.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"faults.json is damaged. .* put back an intact copy, or remove it"):
        loop.train(config, tmp_path)


def test_a_rollback_needs_checkpoints(config: Config) -> None:
    config.train.checkpoint_every, config.train.on_spike = 0, "rollback"
    with pytest.raises(ConfigError, match=r"train.on_spike=rollback with train.checkpoint_every=0: there would be no"):
        config.validate()


def test_not_finite_without_an_action_is_still_an_error(
    config: Config, tmp_path: pathlib.Path, poison: set[int]
) -> None:
    poison.add(NONFINITE)
    config.train.checkpoint_every, config.optimizer.clip_norm = 0, 1.0
    text = (
        r"^Step 7 is not finite: loss nan, gradient norm nan\. Gradients that are not finite: all\.\nA lower .* or an "
        r"optimizer\.clip_norm below 1 often help\. train\.on_nonfinite=skip goes on .*\. "
        r"train\.on_nonfinite=rollback, with train\.checkpoint_every set, goes back .*\. The same command with such a "
        r"change starts again"
    )
    with pytest.raises(NonFiniteError, match=text):
        loop.train(config, tmp_path)


def test_weights_that_make_every_step_bad_are_not_saved(
    config: Config, tmp_path: pathlib.Path, log: pytest.LogCaptureFixture
) -> None:
    loop.train(config, tmp_path)
    diverging = copy.deepcopy(config)
    diverging.train.num_steps, diverging.train.on_nonfinite, diverging.optimizer.learning_rate = 30, "skip", 1e20
    with pytest.raises(FaultError, match=r"is fault number 11 (.|\n)*goes on from .*/checkpoints/10\.$"):
        loop.train(diverging, tmp_path)
    assert Checkpoints(tmp_path).steps()[-1] == STEPS[NONFINITE]
    assert "Nothing is saved after step 23: its weights may be to blame for it." in log.messages
    config.train.num_steps, config.train.on_nonfinite = 12, "skip"
    assert loop.train(config, tmp_path).step == 12  # takes the bad steps again, at a lower learning rate
