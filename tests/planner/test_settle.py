"""Configs with `pipeline.layers_per_stage=balanced`, and the numbers that take the word's place."""

import copy
import dataclasses
import logging
import pathlib
import re
from typing import Any

import pytest

from fiddlex.config import Config, DataConfig, MeshConfig, ModelConfig, PipelineConfig
from fiddlex.config.files import load_config
from fiddlex.config.overrides import replaced
from fiddlex.errors import ConfigError
from fiddlex.hardware.topology import load_topology
from fiddlex.planner.cost_model import CostModel
from fiddlex.planner.predict import predict
from fiddlex.planner.settle import settle, with_settled
from fiddlex.schedules.resolve import resolve
from fiddlex.tools.what_if import Scenario, apply
from tests.planner.test_profile import PROFILE

PREFIX = "pipeline.layers_per_stage=balanced: "


def make_config(num_layers: int = 6, pipe: int = 4, **pipeline: object) -> Config:
    fields = {"schedule": "zb_h1", "num_microbatches": 16, "layers_per_stage": "balanced", **pipeline}
    return Config(
        model=ModelConfig(num_layers=num_layers, hidden_size=1024, num_heads=16, seq_len=512, vocab_size=8192),
        mesh=MeshConfig(pipe=pipe),
        pipeline=PipelineConfig(**fields),  # type: ignore[arg-type]
        data=DataConfig(global_batch_size=16),
    ).validate()


@pytest.mark.parametrize(
    ("config", "source", "line"),
    [
        (
            make_config(recompute="full"),
            {"device_kind": "cpu"},
            "2,1,1,2; by the numbers of operations the fastest of all 10 cuts: a batch takes 13.91% less time in the "
            "pipeline than with 2,2,1,1.",
        ),
        (
            make_config(recompute="full"),
            {"device_kind": "NVIDIA H100 80GB HBM3"},
            "2,1,1,2; by the costs on H100-SXM5-80GB the fastest of all 10 cuts: a batch takes 12.86% less time in the "
            "pipeline than with 2,2,1,1.",
        ),
        (
            make_config(30, schedule="1f1b"),
            {"topology": load_topology("a100_80")},
            "8,8,7,7, the even stages; by the costs on A100-SXM4-80GB the fastest of 400 cuts of 3,654.",
        ),
        (
            make_config(30, recompute="full"),
            {"topology": load_topology("a100_80")},
            "10,5,5,10; by the costs on A100-SXM4-80GB the fastest of 400 cuts of 3,654: a batch takes 5.20% less time "
            "in the pipeline than with 8,8,7,7, and each stage memory for 10 layers instead of 8.",
        ),
        (make_config(4), {}, "1,1,1,1, the only cut."),
        (make_config(5, pipe=1), {}, "5, the only cut."),
    ],
)
def test_the_log_tells_the_numbers_and_why(
    config: Config, source: dict[str, Any], line: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = copy.deepcopy(config)
    with caplog.at_level(logging.INFO, "fiddlex"):
        settled = settle(config, **source)
    assert caplog.messages == [PREFIX + line]
    assert config == before
    cut = line.partition(";")[0].partition(", the")[0]
    assert settled == replaced(config, {"pipeline.layers_per_stage": cut})
    assert ",".join(map(str, resolve(settled).placement.layers_per_stage)) == cut
    assert settle(settled, **source) is settled
    assert with_settled(config, settled) == settled


def test_costs_of_a_profile_are_those_of_its_machine(caplog: pytest.LogCaptureFixture) -> None:
    config = make_config(recompute="full")
    config.model = dataclasses.replace(PROFILE.entries[0].model, num_layers=6)
    with caplog.at_level(logging.INFO, "fiddlex"):
        settled = settle(config, profile=PROFILE)
    assert f"by the times measured on {PROFILE.machine} the fastest of all 10 cuts" in caplog.text
    assert settled.pipeline.layers_per_stage in ("2,1,1,2", "2,2,1,1")


@pytest.mark.parametrize(
    "changes", [{"train.topology": "h100"}, {"train.topology": "v100_16", "model.dtype": "bfloat16"}]
)
def test_devices_that_jax_does_not_name_are_those_of_the_config(
    changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "fiddlex"):
        settle(replaced(make_config(), changes), device_kind="GPU of tomorrow")
    known = changes["train.topology"] == "h100"  # V100s have no bfloat16
    assert ("by the costs on H100-SXM5-80GB" if known else "by the numbers of operations") in caplog.text


def test_a_change_of_the_pipeline_settles_anew() -> None:
    scenario = Scenario(make_config(recompute="full"), topology=load_topology("a100_80"))
    assert scenario.estimate() == apply(scenario, "layers_per_stage=2,1,1,2").estimate()
    even = apply(scenario, "layers_per_stage=")
    assert scenario.seconds() < even.seconds()
    assert apply(even, "layers_per_stage=balanced") == scenario
    assert (
        apply(scenario, "pipe=2").seconds()
        == apply(apply(scenario, "pipe=2"), "pipeline.layers_per_stage=3,3").seconds()
    )


@pytest.mark.parametrize(
    ("word", "hint"),
    [("balance", " Did you mean 'balanced'?"), ("Balanced", " Did you mean 'balanced'?"), ("auto", "")],
)
def test_other_words_are_refused_by_the_config_itself(word: str, hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_config(layers_per_stage=word)
    rule = "must be balanced, or numbers of at least 1, one for each stage, as in 3,2,3."
    assert str(error.value) == f"pipeline.layers_per_stage={word!r} {rule}{hint}"


def test_fewer_layers_than_stages(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"^model\.num_layers=3 is less than the 4 stages of mesh\.pipe=4"):
        make_config(3)
    (tmp_path / "table.csv").write_text("0F0,2F0,2B0,0B0\n1F0,1B0\n")
    config = make_config(2, pipe=2, schedule=f"file:{tmp_path / 'table.csv'}", num_chunks=2, num_microbatches=1)
    with pytest.raises(ConfigError, match=r"^model\.num_layers=2 is less than the 3 stages of the schedule"):
        settle(config)


def test_below_the_planner_the_word_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"^pipeline\.layers_per_stage=balanced: the costs of the model decide"):
        resolve(make_config())


DOCS = (pathlib.Path(__file__).parents[2] / "docs" / "pipeline.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (.*), p=(\d)(.*) \| ([\d,]+) \| (.+) \| ?(.*) \|$", DOCS, re.MULTILINE)


def documented(schedule: str, pipe: int, recompute: str) -> Config:
    """The config of a row of the table in docs/pipeline.md."""
    name, _, chunks = schedule.lower().replace("-", "_").replace(" ", "_").partition(",_v=")
    values = {"mesh.data": 1, "mesh.pipe": pipe, "mesh.tensor": 4, "data.global_batch_size": 8 * pipe}
    values |= {"pipeline.schedule": name, "pipeline.num_chunks": int(chunks or (2 if name == "zb_v" else 1))}
    values |= {"pipeline.num_microbatches": 4 * pipe, "pipeline.recompute": recompute}
    config = load_config(str(pathlib.Path(__file__).parents[2] / "configs" / "gpt3.py:3.6b"))
    return replaced(config, values | {"pipeline.layers_per_stage": "balanced"}).validate()


@pytest.mark.parametrize(("schedule", "pipe", "recompute", "even", "cut", "less"), ROWS, ids="".join)
def test_the_table_of_the_docs(
    schedule: str, pipe: str, recompute: str, even: str, cut: str, less: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert len(ROWS) == 7
    config = documented(schedule, int(pipe), "full" if recompute else "none")
    with caplog.at_level(logging.INFO, "fiddlex"):
        settled = settle(config, load_topology("a100_80"))
    assert settled.pipeline.layers_per_stage == (even if cut == "the same" else cut)
    even_config = replaced(config, {"pipeline.layers_per_stage": ""})
    assert ",".join(map(str, resolve(even_config).placement.layers_per_stage)) == even
    model = CostModel(config, load_topology("a100_80"))
    saved = 1 - predict(settled, model).pipeline / predict(even_config, model).pipeline
    assert f"{saved:.1%}" == (less or "0.0%")
    if (schedule, pipe, recompute) == ("ZB-H1", "4", ""):
        assert caplog.messages[0] in DOCS
    if recompute:
        smaller = replaced(config, {"pipeline.layers_per_stage": "8,7,7,8"})
        assert f"{1 - predict(smaller, model).pipeline / predict(even_config, model).pipeline:.1%}" == "3.5%"
