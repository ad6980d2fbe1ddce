"""The partitioners' answers for models and profiles, and what is printed of them."""

import dataclasses

import pytest

from configs.gpt3 import get_config
from configs.llama import get_config as get_llama
from fiddlex.config import MeshConfig
from fiddlex.costs.sizes import num_parameters
from fiddlex.errors import ConfigError
from fiddlex.hardware.topology import load_topology
from fiddlex.planner.cost_model import CostModel
from fiddlex.planner.layouts import Problem
from fiddlex.tools.partition import Level
from fiddlex.tools.unequal_stages.answers import answers_for_model, answers_for_profile, cluster_levels
from fiddlex.tools.unequal_stages.chain import Chain, Choice, Part, ShardedLayer, StageProblem
from fiddlex.tools.unequal_stages.model_chain import model_problem, tensor_sizes
from fiddlex.tools.unequal_stages.piper import Piper
from fiddlex.tools.unequal_stages.profile_graph import ProfiledLayer
from fiddlex.tools.unequal_stages.report import COLUMNS, EXECUTOR, as_json, as_text, runs
from tests.planner.problems import a_problem

A100 = load_topology("a100_80")


@pytest.mark.parametrize(("config", "tied"), [(get_config("1.7b"), True), (get_llama("8b"), False)])
def test_a_models_chain_has_its_weights_and_its_seconds(config, tied):
    problem = Problem(config, A100, 8)
    stages = model_problem(problem, 4)
    number = stages.num_microbatches
    assert number == config.data.global_batch_size // 4
    alone = sum(layer.weight_bytes for layer in stages.chains[1].layers) / 4
    copy = config.padded_vocab_size * config.model.hidden_size if tied else 0
    assert alone == num_parameters(config) + copy
    times = CostModel(config, A100).microbatch(MeshConfig(), num_microbatches=number, recompute="none")
    roomy = Piper(dataclasses.replace(stages, memory_bytes=1e18))
    stage = roomy.pipeline_of([Part(0, stages.num_layers - 1, 1, 1)]).stages[0]
    assert stage.passes_s == pytest.approx(times.edges + config.model.num_layers * times.layer)
    assert {choice.recompute for choice in stages.chains[1].layers[1].choices} >= {"none", "full"}
    assert tensor_sizes(problem) == [1, 2, 4, 8]
    sharded = sum(layer.weight_bytes for layer in stages.chains[8].layers) / 4
    assert sharded == pytest.approx(alone / 8, rel=0.03)  # positions and vectors are whole


def test_a_flush_adds_the_passes_through_the_other_stages():
    layer = ShardedLayer((Choice(3.0, 1.0),), 0.0, 0.0, 0.0)
    piper = Piper(StageProblem({1: Chain((layer,) * 4)}, 8, 100.0, 1.0, 8))
    even = piper.pipeline_of([Part(0, 1, 2, 1), Part(2, 3, 2, 1)])
    assert (even.seconds, even.filling_s) == (3.0, 6.0)  # (8/2 + 2 − 1) · 6 = 8 · 3 + 6 seconds a batch, as 1F1B takes
    assert piper.pipeline_of([Part(0, 0, 1, 1), Part(1, 3, 4, 1)]).filling_s == 9.0


@pytest.mark.parametrize(
    ("topology", "devices", "levels"),
    [
        ("a100_80", 4, [Level(4, 300e9)]),
        ("a100_80", 8, [Level(8, 300e9)]),
        ("a100_80", 24, [Level(8, 300e9), Level(3, 200e9)]),
        ("tpu_v5e", 1, [Level(1, 100e9)]),
    ],
)
def test_a_clusters_levels_are_its_links(topology, devices, levels):
    assert cluster_levels(load_topology(topology), devices) == levels


def test_devices_that_form_no_levels_are_refused():
    message = "--num_devices=12 are not whole groups of the 8 devices that a link of topology a100_80 joins"
    with pytest.raises(ConfigError, match=f"{message}, which PipeDream's levels are. Use 8 or 16."):
        cluster_levels(A100, 12)


def test_answers_stand_beside_the_best_layouts():
    answers = answers_for_model(a_problem(num_devices=8, layers=6, batch=16), keep=2)
    named = {each.name: each for each in answers.unequal}
    assert list(named) == ["PipeDream", "Piper", "Piper, equal"]
    assert named["Piper"].batch_s <= named["Piper, equal"].batch_s
    facts = as_json(answers)
    assert [each["name"] for each in facts["answers"]] == list(named)
    assert all(sum(s["replicas"] * s["tensor"] for s in each["stages"]) <= 8 for each in facts["answers"])
    assert facts["answers"][1]["fits"]
    assert len(facts["uniform"]) == 2
    assert facts["shortage"] is facts["operations"] is None
    text = as_text(answers)
    assert len(text.splitlines()) == 12
    assert text.splitlines()[-1].startswith("The executor runs uniform layouts only")


def test_where_every_batch_flushes_small_microbatches_are_preferred():
    """Answers with a flush only, against those of a full pipeline."""
    flushed, full = (
        answers_for_model(a_problem(num_devices=8, layers=7, batch=64, semantics=semantics), keep=1).unequal[1]
        for semantics in (("sync",), ("sync", "2bw"))
    )
    assert flushed.examples <= full.examples
    assert flushed.flushed_s <= full.flushed_s
    assert full.batch_s <= flushed.batch_s / 0.99


def test_where_nothing_fits_the_need_is_told():
    problem = Problem(get_config("18.4b"), A100, 1)
    answers = answers_for_model(problem, keep=1)
    assert [each.name for each in answers.unequal] == ["PipeDream"]
    assert answers.uniform == ()
    start, need = answers.shortage.split("the smallest need is ")
    assert start == "No pipeline of stages on 1 device fits 71.32 GiB a device, whatever its stages recompute: "
    need = float(need.split()[0])
    limits = [dataclasses.replace(problem, memory_bytes=int(share * need * 2**30)) for share in (0.99, 1.01)]
    assert [bool(answers_for_model(each, keep=1).shortage) for each in limits] == [True, False]


VGG = (
    *(ProfiledLayer((f"conv{number}",), 0.1, 2e9, 1e8, 1e6) for number in range(6)),
    *(ProfiledLayer((f"linear{number}",), 0.01, 1e6, 1e6, 2e8) for number in range(2)),
)


def test_a_profile_is_answered_and_printed():
    answers = answers_for_profile(VGG, load_topology("v100_16"), 16, memory_bytes=9 * 2**30, num_microbatches=16)
    profile = "8 operations as 8 layers, 620 ms a microbatch, 387.2 MiB of weights"
    too_much = "PipeDream has no cap on memory: its answer does not fit 9.00 GiB of each device."
    assert as_text(answers).split("\n\n") == [
        f"{profile}; 16 Tesla V100-SXM2-16GB, 9.00 GiB of each to use",
        """\
      answer  stages  layers  replicas  tensor  recompute  microbatches  full, s  flush, s  devices   GiB
   PipeDream       1       8        16       1       none            16     0.62      0.62       16  11.9
       Piper       2    2, 6     2 × 8   2 × 1       none            16    5.484     5.684       16   8.2
Piper, equal       2    2, 6     2 × 8   2 × 1       none            16    5.484     5.684       16   8.2""",
        f"{too_much}\n{COLUMNS}\n{EXECUTOR}",
    ]
    facts = as_json(answers)
    assert facts["uniform"] is None
    assert facts["operations"][6] == ("linear0",)


def test_more_replicas_than_microbatches_are_told():
    answers = answers_for_profile(VGG, load_topology("v100_16"), 16, memory_bytes=2**34, num_microbatches=8)
    (line,) = [line for line in as_text(answers).splitlines() if "replicas, " in line]
    assert line.startswith(
        "PipeDream leaves out how large a batch is: of a stage's 16 replicas, 8 get no microbatch, so that"
    )


def test_runs_name_equal_neighbours_once():
    assert runs([7, 3, 3, 3, 5]) == "7, 3 × 3, 5"
    assert runs(range(9)) == "0, 1, 2, …, 8"
    assert runs(range(8)) == "0, 1, 2, 3, 4, 5, 6, 7"
