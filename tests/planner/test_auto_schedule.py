"""Configs with `pipeline.schedule=auto`: the table that takes the word's place, and the memory that it may take."""

import dataclasses
import logging

import pytest

from fiddlex.config import Config, DataConfig, MeshConfig, ModelConfig, PipelineConfig
from fiddlex.config.overrides import replaced
from fiddlex.costs.backend import backend_of
from fiddlex.errors import ConfigError
from fiddlex.hardware.topology import load_topology
from fiddlex.planner.cost_model import CostModel
from fiddlex.planner.layouts import HEADROOM
from fiddlex.planner.predict import needed_memory, pipeline_of, predict
from fiddlex.planner.settle import settle
from fiddlex.schedules.resolve import resolve
from fiddlex.tools.what_if import Scenario, apply

A100 = load_topology("a100_80")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def _short_searches(monkeypatch):
    monkeypatch.setattr("fiddlex.planner.auto_schedule.EFFORT", 40_000)


def make_config(**pipeline: object) -> Config:
    fields = {"schedule": "auto", "num_microbatches": 16, **pipeline}
    return Config(
        model=ModelConfig(num_layers=8, hidden_size=1024, num_heads=16, seq_len=512, vocab_size=8192, dtype="bfloat16"),
        mesh=MeshConfig(pipe=4),
        pipeline=PipelineConfig(**fields),  # type: ignore[arg-type]
        data=DataConfig(global_batch_size=64),
    ).validate()


def smaller(gib: float):
    return dataclasses.replace(A100, chip=dataclasses.replace(A100.chip, memory_gib=gib))


def needed(config: Config) -> int:
    return needed_memory(config, backend_of(A100.compiler)).peak


def test_a_config_without_the_word_stays_as_it_is():
    config = make_config(schedule="zb_h1")
    assert settle(config, A100) is config


@pytest.mark.parametrize("chunks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_the_table_is_no_slower_than_names_that_hold_as_much(chunks, caplog):
    with caplog.at_level(logging.INFO, "fiddlex"):
        settled = settle(make_config(num_chunks=chunks), A100)
    assert settled.pipeline.schedule.startswith("file:")
    model = CostModel(settled, A100)
    for name in ("1f1b", "zb_h1", "zb_h2") if chunks == 1 else ("interleaved_1f1b", "zb_v", "v_half"):
        other = make_config(schedule=name, num_chunks=chunks)
        assert predict(settled, model).pipeline <= predict(other, model).pipeline * (1 + 1e-9)
    (line,) = caplog.messages
    assert line.startswith("pipeline.schedule=auto: a table found among ")
    assert "by the costs on A100-SXM4-80GB its bubble is " in line
    assert resolve(settled).lowered.schedule.placement == pipeline_of(settled).placement.stage_ranks


@pytest.mark.usefixtures("_short_searches")
def test_the_cap_falls_until_the_memory_fits(caplog):
    free = settle(make_config(num_chunks=2), A100)
    least = settle(make_config(num_chunks=2), smaller(0.01))
    assert needed(least) < needed(free)
    limit = (needed(least) + needed(free)) / 2
    with caplog.at_level(logging.INFO, "fiddlex"):
        between = settle(make_config(num_chunks=2), smaller(limit / (1 - HEADROOM) / 2**30))
    assert needed(least) <= needed(between) <= limit
    assert predict(between, CostModel(between, A100)).pipeline < predict(least, CostModel(least, A100)).pipeline
    assert "predicted not to fit the memory of the devices; no schedule needs less" not in caplog.messages[-1]
    assert pipeline_of(least).sizes.slots.stash == 2  # a microbatch of the whole rank


@pytest.mark.parametrize("chunks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_the_cap_falls_little_further_than_it_must(chunks):
    """With a microbatch less in flight, less waits for W too."""
    config = make_config(num_chunks=chunks)
    free = needed_memory(settle(config, A100), backend_of(A100.compiler))
    waiting = free.stash + free.weight_stash
    limit = free.peak - 0.3 * waiting
    between = settle(config, smaller(limit / (1 - HEADROOM) / 2**30))
    assert limit - 0.05 * waiting < needed(between) <= limit


def test_where_the_memory_is_not_known_the_table_holds_as_much_as_1f1b_and_is_no_slower():
    settled, named = settle(make_config(), device_kind="cpu"), make_config(schedule="1f1b")
    assert pipeline_of(settled).sizes.slots.stash <= pipeline_of(named).sizes.slots.stash == 7
    times = [predict(each, CostModel(named, A100)).pipeline for each in (settled, named)]
    assert times[0] <= times[1] * (1 + 1e-9)
    assert settle(make_config(), device_kind="cpu") == settled


@pytest.mark.usefixtures("_short_searches")
def test_layers_are_balanced_for_the_table_that_was_found():
    config = replaced(make_config(layers_per_stage="balanced"), {"model.num_layers": 10})
    settled = settle(config, A100)
    assert settled.pipeline.schedule.startswith("file:")
    assert sum(resolve(settled).placement.layers_per_stage) == 10


@pytest.mark.usefixtures("_short_searches")
def test_what_if_finds_a_schedule_too():
    scenario = Scenario(make_config(schedule="1f1b"), A100)
    assert apply(scenario, "schedule=auto").seconds() < scenario.seconds()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"semantics": "2bw"}, r"with pipeline.semantics=2bw.*: schedules are searched for batches that are flushed"),
        ({"semantics_schedule": "sync:0.2,2bw"}, "schedules are searched for batches that are flushed"),
        ({"order": "strict"}, "with pipeline.order=strict: schedules are searched with everything on the devices"),
        ({"stash_memory": "host"}, "Use pipeline.stash_memory=device, or name a schedule"),
    ],
)
def test_what_cannot_be_searched_is_refused_with_a_remedy(fields, message):
    with pytest.raises(ConfigError, match=message):
        settle(make_config(**fields), A100)


def test_more_actions_than_can_be_searched_are_refused():
    huge = replaced(make_config(), {"data.global_batch_size": 2**20, "pipeline.num_microbatches": 2**20})
    with pytest.raises(ConfigError, match="4 stages and 1,048,576 microbatches make 12,582,912 actions; schedules are"):
        settle(huge, A100)


@pytest.mark.usefixtures("_short_searches")
def test_a_folder_that_cannot_be_written_is_no_reason_to_fail(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert settle(make_config(), A100).pipeline.schedule.startswith(f"file:{tmp_path}/fiddlex-")
    monkeypatch.setattr("tempfile.tempdir", "/dev/null")
    with pytest.raises(ConfigError, match="Set XDG_CACHE_HOME to a folder that you may write"):
        settle(make_config(), A100)
