"""Runs that decide about their semantics: what they decide, that the numbers are those of the phases, and resume."""

import copy
import json
import pathlib
from typing import Any

import chex
import numpy as np
import pytest

from fiddlex.config import Config
from fiddlex.config.unused import reset_unused
from fiddlex.errors import ConfigError
from fiddlex.schedules.semantics import make_phases
from fiddlex.train import loop
from fiddlex.train.run.checkpoints.checkpoint import Checkpoints
from fiddlex.train.sync_switch import Decision, SyncSwitch
from fiddlex.train.trainer import Trainer


@pytest.fixture
def config(tiny_config: Config) -> Config:
    """Two ranks and thirty steps in windows of three, at rates at which the loss soon stops to fall."""
    tiny_config.mesh.pipe, tiny_config.pipeline.num_microbatches = 2, 2
    tiny_config.pipeline.semantics_schedule, tiny_config.train.num_steps = "auto", 30
    tiny_config.pipeline.switch_window, tiny_config.pipeline.switch_threshold = 3, 0.02
    tiny_config.optimizer.schedule, tiny_config.optimizer.learning_rate = "constant", 3e-2
    tiny_config.optimizer.warmup_steps = 4
    return tiny_config


def decided(losses: list[float | None], *, warmup: int = 0) -> list[Decision]:
    config = Config()
    config.pipeline.switch_window, config.pipeline.switch_threshold = 2, 0.1
    config.optimizer.warmup_steps, config.train.num_steps = warmup, len(losses)
    switch = SyncSwitch(config, make_phases("sync", "auto", len(losses)))
    found = [switch.observe(step, loss) for step, loss in enumerate(losses, 1)]
    return [decision for decision in found if decision]


@pytest.mark.parametrize(
    ("losses", "warmup", "expected"),
    [
        ([8, 8, 6, 6, 4, 4, 3, 3, 2, 2, 1, 1], 0, []),  # falls fast to the end
        ([8, 8, 6, 6, 5.9, 5.9, 5, 5, 5, 5, 5, 5], 0, [(6, "2bw", 9)]),
        ([8, 8, 6, 6, 5.9, 5.9, 5.8, 5.8, 5.8, 5.8, 5.8, 5.8], 7, [(8, "2bw", 11)]),  # not in the warm-up
        ([8, 8, 6, 6, 5.9, 5.9, 9, 9, 5, 5, 9, 9, 5, 5, 5, 5], 0, [(6, "2bw", 9)]),  # two bad windows, not running
        (
            [8, 8, 6, 6, 5.9, 5.9, 5.9, 5.9, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7],
            0,
            [(6, "2bw", 9), (12, "sync", 15), (16, "2bw", 19)],
        ),
        ([8, 8, 6, 6, 5.9, 5.9, 5, 5], 0, []),  # too late
        ([8, 8, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1], 0, [(6, "2bw", 9), (14, "sync", 17)]),  # all known
        ([8, 8, None, 6, 5.9, None, 5, 5, 5, 5, 5, 5], 0, [(6, "2bw", 9)]),  # each window ends where it should
        ([8, 8, 6, 6, None, None, 5.9, 5.9, 5, 5, 5, 5, 5, 5], 0, [(8, "2bw", 11)]),
    ],
)
def test_decisions_follow_from_the_means_of_windows(
    losses: list[float | None], warmup: int, expected: list[tuple[int, str, int]]
) -> None:
    found = [(each.step, each.semantics, each.first_step) for each in decided(losses, warmup=warmup)]
    assert found == expected


def test_what_is_saved_stays_as_it_was() -> None:
    """Orbax writes it while later steps are observed."""
    switch = SyncSwitch(Config(), make_phases("sync", "auto", 100))
    for step in range(1, 52):
        switch.observe(step, 1.0)
    saved = switch.saved()
    text = json.dumps(saved)
    for step in range(52, 90):
        switch.observe(step, 2.0)
    assert json.dumps(saved) == text


def phases_of(path: pathlib.Path) -> list[dict[str, Any]]:
    records = map(json.loads, (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [record for record in records if "semantics" in record]


def test_a_run_decides_as_it_goes_and_trains_as_those_phases_do(config: Config, tmp_path: pathlib.Path) -> None:
    config.train.log_every = 1
    loop.train(copy.deepcopy(config), tmp_path)
    decisions = phases_of(tmp_path)
    assert [decision["semantics"] for decision in decisions[:1]] == ["2bw"]
    starts = [decision["semantics_from_step"] - 1 for decision in decisions]
    names = ["sync", *(decision["semantics"] for decision in decisions)]
    lengths = np.diff([0, *starts])
    schedule = ",".join([f"{n}:{k}" for n, k in zip(names[:-1], lengths, strict=True)] + names[-1:])
    fixed = copy.deepcopy(config)
    fixed.pipeline.semantics_schedule = schedule
    reset_unused(fixed)
    records = list(Trainer(fixed).steps(30))
    lines = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [record["loss"] for record in map(json.loads, lines) if "loss" in record]
    assert losses == [record["loss"] for record in records]


@pytest.mark.long
def test_a_resumed_run_decides_alike(config: Config, tmp_path: pathlib.Path) -> None:
    whole = Trainer(copy.deepcopy(config))
    losses, decisions = [], []
    for _ in range(30):
        losses.append(whole.record(whole.dispatch())["loss"])
        decisions.append(whole.decision)
    made = [decision for decision in decisions if decision]
    assert made
    # In the middle of a window, and between a decision and its first step.
    for stop in (made[0].step - 1, made[0].step, made[0].first_step + 1):
        first, second = Trainer(copy.deepcopy(config)), Trainer(copy.deepcopy(config))
        for _ in range(stop):
            first.record(first.dispatch())
        with Checkpoints(tmp_path / str(stop)) as checkpoints:
            first.save(checkpoints)
        with Checkpoints(tmp_path / str(stop)) as checkpoints:
            assert second.restore(checkpoints)
        found, again = [], []
        for _ in range(30 - stop):
            found.append(second.record(second.dispatch())["loss"])
            again.append(second.decision)
        assert (found, again) == (losses[stop:], decisions[stop:])
        chex.assert_trees_all_equal(second.weights(), whole.weights())


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("semantics", "auto", "auto is a schedule, not one kind of semantics; set pipeline.semantics_schedule=auto"),
        ("semantics_schedule", "sync:5,auto", "not one kind of semantics; write it alone: the run itself decides"),
        ("semantics_schedule", "auto:5,2bw", "'auto' stands alone, without phases beside it"),
        ("semantics", "2bw", "pipeline.semantics=2bw and pipeline.semantics_schedule='auto': one run has either"),
        ("switch_window", 0, "pipeline.switch_window=0 must be at least 1"),
        ("switch_threshold", 1.5, "pipeline.switch_threshold=1.5 must be at least 0 and below 1"),
        ("num_microbatches", 1, "2bw with pipeline.num_microbatches=1 and mesh.pipe=2"),
    ],
)
def test_what_cannot_be_decided_is_told(field: str, value: Any, message: str, config: Config) -> None:
    if field == "semantics" and value == "auto":
        config.pipeline.semantics_schedule = ""
    setattr(config.pipeline, field, value)
    reset_unused(config, by=[f"pipeline.{field}", "pipeline.semantics_schedule"])
    with pytest.raises(ConfigError) as raised:
        Trainer(config)
    assert message in str(raised.value)
