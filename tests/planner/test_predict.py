"""Steps of configs that have no closed forms: tables in files, own generators, uneven stages, phases."""

import dataclasses

import pytest

from fiddlex.config import Config, MeshConfig, ModelConfig, PipelineConfig
from fiddlex.costs.backend import GPU
from fiddlex.costs.memory import device_memory
from fiddlex.errors import ConfigError
from fiddlex.hardware.topology import load_topology
from fiddlex.planner.cost_model import CostModel
from fiddlex.planner.predict import needed_memory, predict
from fiddlex.schedules.generators import GENERATORS, make_schedule
from fiddlex.schedules.lowering import lower
from fiddlex.schedules.placement import place_layers
from fiddlex.schedules.resolve import resolve
from fiddlex.schedules.text import to_csv
from fiddlex.simulate.lockstep import lockstep

M = 16


def make_config(**pipeline):
    config = Config(
        model=ModelConfig(num_layers=8, hidden_size=256, vocab_size=512, seq_len=64, dtype="bfloat16"),
        mesh=MeshConfig(data=1, pipe=4),
        pipeline=PipelineConfig(num_microbatches=M) if not pipeline else PipelineConfig(**pipeline),
    )
    config.pipeline.num_microbatches, config.data.global_batch_size = M, 2 * M
    return config.validate()


def seconds(config):
    return predict(config, CostModel(config, load_topology("a100_80"))).pipeline


def simulated(config, schedule, layers_per_stage=""):
    """Seconds of one flushed batch, from the whole table."""
    times = CostModel(config, load_topology("a100_80")).microbatch(config.mesh, num_microbatches=M, recompute="none")
    placement = place_layers(schedule.placement, config.model.num_layers, layers_per_stage)
    return lockstep(lower(schedule), times.costs(placement)).makespan


def peak(config):
    return needed_memory(config, GPU).peak


@pytest.mark.parametrize("order", ["ahead", "strict"])
@pytest.mark.parametrize(
    ("schedule", "chunks", "semantics"), [("1f1b", 1, "sync"), ("1f1b", 1, "2bw"), ("dual_pipe_v", 2, "sync")]
)
def test_a_table_in_a_file_takes_what_its_generator_does(schedule, chunks, semantics, order, tmp_path):
    path = tmp_path / "table.csv"
    path.write_text(to_csv(make_schedule(schedule, pipe=4, num_microbatches=M)))
    same = {"num_chunks": chunks, "semantics": semantics, "order": order}
    known, table = (make_config(schedule=name, **same) for name in (schedule, f"file:{path}"))
    if semantics == "sync":
        assert seconds(table) == pytest.approx(seconds(known), rel=1e-12)
        assert peak(table) == peak(known)
    else:  # the table of a batch is repeated, and does not run into the next batch as well as 1F1B of many batches does
        assert seconds(known) <= seconds(table) < 1.5 * seconds(known)


@pytest.mark.parametrize("layers", ["5,1,1,1", "1,1,1,5", "2,2,2,2"])
def test_uneven_stages_take_what_the_whole_table_does(layers):
    config, schedule = make_config(layers_per_stage=layers), make_schedule("1f1b", pipe=4, num_microbatches=M)
    assert seconds(config) == pytest.approx(simulated(config, schedule, layers), rel=1e-12)
    assert (seconds(config) > 1.1 * seconds(make_config())) == (layers != "2,2,2,2")
    assert (peak(config) > peak(make_config())) == (layers != "2,2,2,2")


def test_phases_take_the_mean_over_steps_and_the_memory_of_the_largest():
    whole = {name: make_config(semantics=name) for name in ("sync", "2bw")}
    phases = make_config(semantics_schedule="sync:0.25,2bw")
    assert seconds(phases) == pytest.approx(0.25 * seconds(whole["sync"]) + 0.75 * seconds(whole["2bw"]), rel=1e-12)
    assert peak(phases) >= max(map(peak, whole.values()))


def lazy(*, pipe, chunks=1, num_microbatches):
    """Like 1F1B up to twelve microbatches, and worse beyond: no period that few microbatches show."""
    name = "1f1b" if num_microbatches <= 12 else "gpipe"
    schedule = GENERATORS[name](pipe=pipe, chunks=chunks, num_microbatches=num_microbatches)
    rows = schedule.actions
    if name == "gpipe":  # the last microbatch runs backward first
        rows = tuple((*row[:num_microbatches], *reversed(row[num_microbatches:])) for row in rows)
    return dataclasses.replace(schedule, name="lazy", actions=rows)


def test_a_generator_without_traits_is_simulated_whole(monkeypatch):
    monkeypatch.setitem(GENERATORS, "lazy", lazy)
    config, schedule = make_config(schedule="lazy"), make_schedule("lazy", pipe=4, num_microbatches=M)
    assert seconds(config) == pytest.approx(simulated(config, schedule), rel=1e-12)
    expected = device_memory(config, resolve(config).spec.sizes, resolve(config).placement, GPU)
    assert needed_memory(config, GPU) == expected
    assert expected.stash > needed_memory(make_config(), GPU).stash


def test_a_name_given_to_another_generator_is_predicted_anew(monkeypatch):
    monkeypatch.setitem(GENERATORS, "mine", lazy)
    before = peak(make_config(schedule="mine"))
    monkeypatch.setitem(GENERATORS, "mine", GENERATORS["1f1b"])
    assert peak(make_config(schedule="mine")) == peak(make_config()) < before


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        ({"schedule": "file:none.csv"}, "none.csv cannot be read"),
        ({"semantics_schedule": "sync:2.5,2bw"}, "pipeline.semantics_schedule='sync:2.5,2bw'"),
        ({"layers_per_stage": "4,4"}, "pipeline.layers_per_stage='4,4' has 2 stages"),
    ],
)
def test_what_would_not_train_is_not_predicted(pipeline, message):
    with pytest.raises(ConfigError) as error:
        seconds(make_config(**pipeline))
    assert message in str(error.value)
