"""Changes of hardware, config and optimizer, and what they make of a step."""

import dataclasses

import pytest

from fiddlex.config import Config, MeshConfig, ModelConfig, PipelineConfig
from fiddlex.config.overrides import replaced
from fiddlex.costs.backend import GPU
from fiddlex.errors import ConfigError
from fiddlex.hardware.topology import load_topology
from fiddlex.planner.predict import needed_memory
from fiddlex.tools.what_if import Scenario, apply, what_if
from tests.planner.test_profile import PROFILE


def make_config():
    config = Config(
        model=ModelConfig(num_layers=8, hidden_size=1024, num_heads=16, seq_len=512, vocab_size=8192, dtype="bfloat16"),
        mesh=MeshConfig(data=4, pipe=2, tensor=4),
        pipeline=PipelineConfig(num_microbatches=8, recompute="full"),
    )
    config.data.global_batch_size = 64
    return config


ON_A100 = Scenario(make_config(), topology=load_topology("a100_80"))
HERE = Scenario(dataclasses.replace(make_config(), model=PROFILE.entries[0].model), profile=PROFILE)


@pytest.mark.parametrize(
    "change", ["bandwidth*2", "latency*0.5", "chip=h200", "recompute=none", "fused_optimizer", "num_microbatches=16"]
)
def test_what_is_better_is_never_slower_and_changes_only_what_it_names(change):
    (answer,) = what_if(ON_A100, [change])
    assert answer.before.seconds == ON_A100.seconds()
    if change != "num_microbatches=16":
        assert answer.ratio < 1
    changed = apply(ON_A100, change)
    different = [f.name for f in dataclasses.fields(Scenario) if getattr(changed, f.name) != getattr(ON_A100, f.name)]
    assert len(different) == 1


def test_links_twice_as_fast_without_latency_halve_what_is_exchanged():
    instant = apply(ON_A100, "latency*1e-9")
    exchanged = instant.seconds() - apply(instant, "bandwidth*1e9").seconds()
    assert exchanged > 0
    assert instant.seconds() - apply(instant, "bandwidth*2").seconds() == pytest.approx(exchanged / 2, rel=1e-3)


def test_another_axis_across_the_slow_link_changes_the_time_and_no_memory():
    """Hops and sums over the pipe of this small model are more bytes than its gradients and weights."""
    scenario = dataclasses.replace(ON_A100, config=replaced(ON_A100.config, {"mesh.data": 2}))
    (answer,) = what_if(scenario, ["outermost=pipe"])
    assert answer.ratio > 1.1
    assert answer.after.peak_bytes == answer.before.peak_bytes


def test_rings_hide_exchange_and_save_less():
    config = replaced(
        ON_A100.config, {"model.seq_len": 2048, "mesh.sequence_parallel": True, "pipeline.recompute": "none"}
    )
    (answer,) = what_if(Scenario(config, topology=load_topology("tpu_v5p")), ["collective_matmul=true"])
    assert answer.ratio < 1
    assert answer.after.peak_bytes < answer.before.peak_bytes


def test_a_fused_optimizer_saves_one_of_eight_passes_of_the_update():
    scenario = dataclasses.replace(HERE, profile=dataclasses.replace(PROFILE, fixed_s=0.0))
    (answer,) = what_if(scenario, ["fused_optimizer"])
    free = dataclasses.replace(scenario, profile=dataclasses.replace(scenario.profile, update_s=0.0)).seconds()
    before, after = answer.before.seconds, answer.after.seconds
    assert before - after == pytest.approx((before - free) / 8)


def test_all_together_come_last():
    changes = ["recompute=none", "bandwidth*2"]
    *alone, together = what_if(ON_A100, changes)
    assert [answer.change for answer in alone] == changes
    assert together.after == apply(apply(ON_A100, changes[0]), changes[1]).estimate()
    assert together.ratio < min(answer.ratio for answer in alone)


def test_memory_and_devices_are_told_of_topologies_alone():
    before = ON_A100.estimate()
    assert (before.num_devices, before.fits) == (32, True)
    assert before.peak_bytes == needed_memory(ON_A100.config, GPU).peak
    half = apply(ON_A100, "tensor=2").estimate()
    assert (half.num_devices, half.fits) == (16, True)
    assert half.peak_bytes > before.peak_bytes
    assert HERE.estimate()[1:] == (32, None, None, None)
    huge = apply(ON_A100, "model.num_layers=8192").estimate()
    assert not huge.fits


def test_a_step_does_not_fit_where_the_host_lacks_memory():
    offloaded = apply(ON_A100, "optimizer.offload=true")
    assert offloaded.estimate().fits
    assert offloaded.estimate().host_bytes == needed_memory(offloaded.config, GPU).of_host > 0
    host = dataclasses.replace(offloaded.topology.host, memory_gib=0.01)
    small = dataclasses.replace(offloaded, topology=dataclasses.replace(offloaded.topology, host=host))
    assert small.estimate().fits is False


def test_another_chip_brings_what_compiles_for_it():
    config = dataclasses.replace(make_config(), model=dataclasses.replace(make_config().model, dtype="float16"))
    config = dataclasses.replace(config, pipeline=dataclasses.replace(config.pipeline, recompute="none"))
    before = dataclasses.replace(ON_A100, config=config)
    after = apply(before, "chip=v100_16")
    assert after.estimate().peak_bytes > before.estimate().peak_bytes  # it has no flash kernel
    assert after.topology.links == before.topology.links


def test_fields_have_their_types():
    assert apply(ON_A100, "sequence_parallel=true").config.mesh.sequence_parallel is True
    assert apply(ON_A100, "mesh.pipe=4").config.mesh.pipe == 4
    assert apply(ON_A100, "mesh.outermost=pipe").config.mesh.outermost == "pipe"
    assert apply(ON_A100, "optimizer=sgd").config.optimizer.name == "sgd"
    assert ON_A100.config == make_config()


@pytest.mark.parametrize(
    ("scenario", "change", "message"),
    [
        (ON_A100, "bandwith*2", "--change=bandwith*2: Did you mean 'bandwidth'?"),
        (ON_A100, "mesh.pip=2", "--change=mesh.pip=2:"),
        (ON_A100, "model.head_size=2", "--change=model.head_size=2:"),
        (ON_A100, "model.validate=2", "--change=model.validate=2:"),
        (ON_A100, "bandwidth=2", "--change=bandwidth=2: write bandwidth*VALUE."),
        (ON_A100, "fused_optimizer=1", "--change=fused_optimizer=1: write fused_optimizer."),
        (ON_A100, "recompute", "--change=recompute: write recompute=VALUE."),
        (ON_A100, "mesh.pipe=", "mesh.pipe= must be of type int."),
        (ON_A100, "bandwidth*", "bandwidth*: the factor must be a number, as in bandwidth*0.5"),
        (ON_A100, "bandwidth*fast", "bandwidth*fast: the factor must be a number, as in bandwidth*0.5"),
        (ON_A100, "mesh.pipe=two", "mesh.pipe=two must be of type int."),
        (ON_A100, "zero1=2", "optimizer.zero1=2: write true or false."),
        (HERE, "chip=h200", "chip is that of a topology; a profile has measured times alone."),
    ],
)
def test_what_cannot_be_changed_is_refused(scenario, change, message):
    with pytest.raises(ConfigError) as error:
        apply(scenario, change)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("semantics=3bw", "pipeline.semantics: there are no semantics '3bw'. Did you mean '2bw'?"),
        ("semantics=delay:x", "pipeline.semantics: 'delay:x' must be delay:K"),
        ("num_chunks=2", "schedule 1f1b has other sizes: set pipeline.num_chunks=1 (not 2)."),
        ("schedule=zb_v", "schedule zb_v has other sizes: set pipeline.num_chunks=2 (not 1)."),
        ("schedule=interleaved_1f1b", "interleaved_1f1b with pipe=2, num_microbatches=1"),
        ("semantics=2bw", "2bw with pipeline.num_microbatches=1 and mesh.pipe=2: it needs at least as many"),
    ],
)
def test_what_would_not_train_is_not_predicted(change, message):
    scenario = dataclasses.replace(ON_A100, config=dataclasses.replace(make_config()))
    scenario.config.pipeline = PipelineConfig(num_microbatches=1 if "num_microbatches=1" in message else 8)
    with pytest.raises(ConfigError) as error:
        what_if(scenario, [change])
    assert message in str(error.value)


def test_weights_that_do_not_lag_are_those_of_a_flush():
    assert [answer.ratio for answer in what_if(ON_A100, ["semantics=delay:0"])] == [1.0]


def test_a_config_at_odds_with_itself_is_refused():
    with pytest.raises(ConfigError, match=r"mesh\.tensor=3"):
        what_if(ON_A100, ["mesh.tensor=3"])


def test_a_field_is_emptied():
    scenario = dataclasses.replace(ON_A100, config=replaced(ON_A100.config, {"pipeline.layers_per_stage": "1,3"}))
    assert apply(scenario, "pipeline.layers_per_stage=").config.pipeline.layers_per_stage == ""
