"""Runs with `pipeline.layers_per_stage=balanced`: their layers, their workdirs, and what starts from these."""

import copy
import json
import logging
import pathlib

import pytest

from fiddlex.cluster.mesh import make_mesh, make_topology_mesh
from fiddlex.config import Config
from fiddlex.config.overrides import replaced
from fiddlex.errors import ConfigError
from fiddlex.hardware.topology import load_topology
from fiddlex.planner.settle import settle
from fiddlex.train import loop
from fiddlex.train.run.transfer.result import load_result
from fiddlex.train.step.program import Program
from fiddlex.train.trainer import Trainer, load_trainer
from fiddlex.xla.ahead_of_time import compile_ahead
from tests.train.layouts import BALANCED, Case


@pytest.fixture
def config(tiny_config: Config) -> Config:
    """Five layers on two ranks, in a schedule in which the larger stage is to be the last by 2%."""
    tiny_config.model.num_layers, tiny_config.mesh.pipe, tiny_config.train.num_steps = 5, 2, 4
    pipeline = tiny_config.pipeline
    pipeline.schedule, pipeline.num_microbatches, pipeline.layers_per_stage = "zb_h1", 4, "balanced"
    pipeline.recompute = "full"
    tiny_config.train.checkpoint_every, tiny_config.optimizer.schedule = 2, "constant"
    return tiny_config


def saved_field(workdir: pathlib.Path, path: str) -> object:
    section, _, field = path.partition(".")
    return json.loads((workdir / "config.json").read_text())[section][field]


@pytest.mark.parametrize(("case", "cut"), [(BALANCED[0], (2, 1, 1, 2)), (BALANCED[1], (1, 2, 1, 2))], ids=str)
def test_layouts_that_are_compared_with_the_reference_are_not_even(
    case: Case, cut: tuple[int, ...], tiny_config: Config
) -> None:
    trainer = case.trainer(tiny_config)
    assert trainer.layout.placement.layers_per_stage == cut
    assert trainer.config.pipeline.layers_per_stage == ",".join(map(str, cut))
    assert tiny_config.pipeline.layers_per_stage == "balanced"


def test_a_run_keeps_its_layers_when_the_word_is_typed_again(
    config: Config, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first part has lost a replica, so that its config is not the one that was given."""
    workdir, typed = tmp_path / "run", replaced(config, {"mesh.data": 2, "train.num_steps": 2})
    with caplog.at_level(logging.INFO, "fiddlex"):
        loop.train(replaced(typed, {"mesh.data": 1}), workdir, given=typed)
        assert (saved_field(workdir, "mesh.data"), saved_field(workdir, "pipeline.layers_per_stage")) == (2, "2,3")
        told = "pipeline.layers_per_stage=balanced: 2,3; by the numbers of operations the fastest of all 4 cuts"
        assert sum(told in message for message in caplog.messages) == 1
        typed.train.num_steps = 4
        loop.train(copy.deepcopy(typed), workdir, given=typed)
    assert saved_field(workdir, "pipeline.layers_per_stage") == "2,3"
    assert typed.pipeline.layers_per_stage == "balanced"
    assert "has changed since this run was last started: train.num_steps 2 → 4." in caplog.text
    losses = [json.loads(line).get("loss") for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    whole = [record["loss"] for record in Trainer(replaced(config, {"pipeline.layers_per_stage": "2,3"})).steps(4)]
    assert [loss for loss in losses if loss is not None] == pytest.approx(whole, rel=1e-5)

    numbers = load_trainer(workdir)
    assert numbers.config.pipeline.layers_per_stage == "2,3"
    with pytest.raises(ConfigError, match="empty for even stages, or take balanced for the fastest"):
        load_trainer(workdir, lambda saved: replaced(saved, {"mesh.pipe": 1}))
    other = load_trainer(
        workdir, lambda saved: replaced(saved, {"mesh.pipe": 1, "pipeline.layers_per_stage": "balanced"})
    )
    assert other.evaluate()["eval_loss"] == pytest.approx(numbers.evaluate()["eval_loss"], rel=1e-5)
    program, state = load_result(workdir)  # for texts, and for other programs' formats
    assert (program.layout.placement.layers_per_stage, int(state.step)) == ((2, 3), 4)


def test_a_step_is_compiled_with_the_layers_that_a_run_has(config: Config) -> None:
    ahead = compile_ahead(config.validate(), make_mesh(config.mesh))
    assert ahead.program.config.pipeline.layers_per_stage == "2,3"
    assert ahead.program.layout.placement.layers_per_stage == (2, 3)


def test_costs_are_those_of_the_devices(config: Config, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("libtpu", reason="compiling for TPUs takes libtpu, of the extra `aot`")
    config.mesh.pipe, config.model.num_layers, config.model.dtype = 4, 6, "bfloat16"
    mesh = make_topology_mesh(config.mesh, "tpu:v5e:2x2")
    with caplog.at_level(logging.INFO, "fiddlex"):
        program = Program(config.validate(), mesh)
    assert "by the costs on TPU v5e" in caplog.text
    assert program.config == settle(config, load_topology("tpu_v5e"))
