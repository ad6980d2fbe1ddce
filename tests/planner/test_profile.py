"""Profiles as files, what is read off them, and how they are fitted to times."""

import dataclasses
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fiddlex.config import Config, MeshConfig, ModelConfig, PipelineConfig
from fiddlex.config.overrides import replaced
from fiddlex.costs.weight_memory import device_parameters
from fiddlex.errors import ConfigError
from fiddlex.planner.fit import Calibration, Run, fit_parts
from fiddlex.planner.predict import predict
from fiddlex.planner.profile import Entry, Profile, ProfiledCostModel, load_profile, nearest_entry, save_profile

MODEL = ModelConfig(num_layers=8, hidden_size=64, num_heads=4, seq_len=32, vocab_size=128)
ENTRY = Entry(MODEL, 1, False, 2, "none", forward_s=0.01, backward_s=0.03, edges_s=0.004)
PROFILE = Profile(
    machine="2 cores",
    jax_version="0.10.2",
    date="2026-11-23",
    optimizer="adamw",
    devices=(1, 2, 4),
    sharing=(1.0, 1.5, 3.0),
    tick_s=(0.0, 0.001, 0.002),
    exchange_s=(0.0, 1e-9, 2e-9),
    update_s=1e-8,
    fixed_s=0.005,
    entries=(ENTRY,),
)


def make_config(mesh=None, pipeline=None, examples=2, **model):
    pipeline = pipeline or PipelineConfig(num_microbatches=4)
    config = Config(model=dataclasses.replace(MODEL, **model), mesh=mesh or MeshConfig(), pipeline=pipeline)
    config.data.global_batch_size = config.mesh.data * pipeline.num_microbatches * examples
    return config


def seconds(config, profile=PROFILE):
    return predict(config, ProfiledCostModel(config, profile)).seconds


def test_a_file_gives_back_what_was_written(tmp_path):
    save_profile(PROFILE, tmp_path / "here.json")
    assert load_profile(tmp_path / "here.json") == PROFILE


def without(name):
    return lambda values: values.pop(name)


def put(value, *path):
    def change(values):
        for key in path[:-1]:
            values = values[key]
        values[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put(1, "machin"), "profile has no field 'machin'. Did you mean 'machine'?"),
        (without("update_s"), "profile lacks update_s."),
        (put("1", "update_s"), "profile.update_s='1' is a str; it must be of type float"),
        (put(-1.0, "fixed_s"), "profile.fixed_s=-1.0"),
        (put([1.0, 1.5], "sharing"), "profile.sharing has 2 values for 3 numbers of devices: give one each."),
        (put([1.0, 0.5, 3.0], "sharing"), "profile.sharing=[1.0, 0.5, 3.0] must be at least 1 and finite."),
        (put([2, 4, 8], "devices"), "profile.devices=[2, 4, 8] must begin with 1 and ascend."),
        (put(2, "version"), "profile.version=2: this fiddlex reads 1. Measure it anew."),
        (put([], "entries"), "profile.entries is empty"),
        (put(0.0, "entries", 0, "forward_s"), "profile.entries[0]: forward_s=0.0"),
        (put(math.nan, "entries", 0, "backward_s"), "profile.entries[0]: backward_s=nan"),
        (put("adamv", "optimizer"), "profile.optimizer='adamv' is not one of "),
        (put(3, "entries", 0, "tensor"), "profile.entries[0]: model.num_heads=4 is not a multiple of tensor=3"),
        (put(True, "entries", 0, "collective_matmul"), "profile.entries[0]: mesh.collective_matmul=True with"),
        (put("half", "entries", 0, "recompute"), "profile.entries[0]: recompute='half'"),
        (put(7, "entries", 0, "model", "num_heads"), "profile.entries[0]: model.hidden_size=64"),
    ],
)
def test_a_file_that_is_no_profile_is_refused_by_name_and_field(change, message, tmp_path):
    values = dataclasses.asdict(PROFILE)
    values = json.loads(json.dumps(values))
    change(values)
    path = tmp_path / "here.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError) as error:
        load_profile(path)
    assert str(error.value).startswith(f"{path}: {message}")


def test_a_file_that_is_missing_or_no_json_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no profile .*fiddlex benchmark --profile"):
        load_profile(tmp_path / "none.json")
    for text in ("{", "9" * 5000):
        (tmp_path / "text").write_text(text)
        with pytest.raises(ConfigError, match="text is no profile"):
            load_profile(tmp_path / "text")


def test_what_was_measured_is_predicted_as_it_was():
    config = make_config()
    once = 0.005 + device_parameters(config, 8) * 1e-8
    assert seconds(config) == pytest.approx(4 * (8 * 0.04 + 0.004) + once)


def test_replicas_lose_what_sharing_says():
    config = make_config(MeshConfig(data=2))
    weights = device_parameters(config, 8)
    once = 0.005 + weights / 2 * 1e-8 * 1.5 + weights * 1e-9
    assert seconds(config) == pytest.approx(4 * (8 * 0.04 + 0.004) * 1.5 + once)


def test_a_pipeline_by_hand():
    """Four microbatches on two ranks, six ticks: in the first and the last slot of each kind one rank is alone."""
    config = make_config(MeshConfig(pipe=2))
    stage, weights = 4 * 0.04, device_parameters(config, 4)
    times = ProfiledCostModel(config, PROFILE).microbatch(config.mesh, num_microbatches=4, recompute="none")
    assert times.sharing == (1.0, 1.5)
    # Each rank looks up all tokens and scores half of the vocabulary, in company.
    assert 0.5 * 0.004 * 1.5 < times.edges < 0.004 * 1.5
    expected = (2 + 3 * 1.5) * stage + 4 * times.edges + 6 * 0.001 + 0.005 + weights * 1e-8 * 1.5
    assert seconds(config) == pytest.approx(expected)


def test_a_larger_shape_takes_as_much_more_as_it_has_work():
    twice = make_config(examples=4)
    assert seconds(twice) == pytest.approx(2 * seconds(make_config()), rel=0.1)
    model = ProfiledCostModel(make_config(hidden_size=128), PROFILE)
    times = model.microbatch(MeshConfig(), num_microbatches=4, recompute="none")
    assert 2.5 * 0.01 < times.forward < 4 * 0.01  # four times in products with weights, twice in attention
    again = ProfiledCostModel(make_config(), PROFILE).microbatch(MeshConfig(), num_microbatches=4, recompute="full")
    assert again.layer == pytest.approx(0.05, rel=0.1)  # the forward pass once more


def test_the_nearest_entry_runs_in_the_same_way():
    wide = dataclasses.replace(ENTRY, tensor=2)
    recomputed = dataclasses.replace(ENTRY, recompute="full")
    large = dataclasses.replace(ENTRY, microbatch_size=8)
    listed = dataclasses.replace(ENTRY, recompute="norms,gelu", microbatch_size=4)
    entries = [ENTRY, wide, recomputed, large, listed]
    one = PipelineConfig()
    assert nearest_entry(entries, make_config(pipeline=one)) == ENTRY
    assert nearest_entry(entries, make_config(MeshConfig(tensor=4), one)) == wide
    assert nearest_entry(entries, make_config(pipeline=PipelineConfig(recompute="full"), examples=8)) == recomputed
    assert nearest_entry(entries, make_config(pipeline=one, examples=6)) == large
    assert nearest_entry(entries, make_config(pipeline=PipelineConfig(recompute="gelu,norms"))) == listed


def test_an_entry_without_pieces_predicts_no_pieces():
    rings = MeshConfig(tensor=2, sequence_parallel=True, collective_matmul=True)
    without = dataclasses.replace(ENTRY, tensor=2, sequence_parallel=True)
    with_rings = dataclasses.replace(without, forward_s=0.001, collective_matmul=True)
    one, other, both = (
        dataclasses.replace(PROFILE, entries=entries) for entries in ((without,), (with_rings,), (without, with_rings))
    )
    plain = dataclasses.replace(rings, collective_matmul=False)
    with pytest.raises(ConfigError, match=r"matmul=True with mesh.tensor=2: .* measured without products in pieces"):
        seconds(make_config(rings), one)
    with pytest.raises(ConfigError, match=r"matmul=False with mesh.tensor=2: .* measured with products in pieces"):
        seconds(make_config(plain), other)
    assert seconds(make_config(rings), both) == seconds(make_config(rings), other) < seconds(make_config(plain), both)
    alone = dataclasses.replace(rings, tensor=1)  # one rank has no ring
    assert seconds(make_config(alone), both) == seconds(make_config(alone), one)
    assert one.with_entry(with_rings).entries == both.entries


def test_an_entry_takes_the_place_of_its_shape():
    faster = dataclasses.replace(ENTRY, forward_s=0.005, model=dataclasses.replace(MODEL, num_layers=2))
    other = dataclasses.replace(ENTRY, tensor=2)
    assert PROFILE.with_entry(other).with_entry(faster).entries == (other, faster)
    selective, attention = (dataclasses.replace(ENTRY, recompute=recompute) for recompute in ("selective", "attention"))
    assert PROFILE.with_entry(selective).with_entry(attention).entries == (ENTRY, attention)


def test_another_dtype_is_refused():
    with pytest.raises(ConfigError, match=r"model.dtype=bfloat16: the profile of 2 cores has entries of float32 alone"):
        ProfiledCostModel(make_config(dtype="bfloat16"), PROFILE)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"optimizer.offload": True}, "optimizer.offload=True"),
        ({"pipeline.stash_memory": "host"}, "pipeline.stash_memory=host"),
        (
            {"optimizer.offload": True, "pipeline.weights_memory": "host"},
            "optimizer.offload=True and pipeline.weights_memory=host",
        ),
    ],
)
def test_what_waits_on_hosts_is_refused_since_no_copy_was_measured(fields, told):
    with pytest.raises(ConfigError, match=f"^{told}: a profile has no times of copies to and from the host"):
        ProfiledCostModel(replaced(make_config(), fields), PROFILE)


TIMES = st.floats(0.001, 1.0)


@settings(max_examples=40, deadline=None)
@given(
    TIMES, TIMES, st.floats(0.0, 0.01), st.floats(0.0, 1e-7), st.floats(0.0, 0.01), st.floats(1.0, 2.0), st.booleans()
)
def test_a_machine_is_found_again_from_its_steps(forward_s, ratio, edges_s, update_s, fixed_s, slower, zero1):
    """A profile fitted to what another predicts predicts the same of layouts that neither is made of."""
    # Exchange beyond the update is told from fixed costs, so both are part of what must come out.
    entry = dataclasses.replace(
        ENTRY, forward_s=forward_s, backward_s=forward_s * (1 + 8 * ratio), edges_s=edges_s * forward_s
    )
    truth = dataclasses.replace(
        PROFILE, entries=(entry,), update_s=update_s, fixed_s=fixed_s, sharing=(1.0, slower, 2 * slower)
    )

    def make(*parts):
        config = make_config(*parts)
        config.optimizer.zero1 = zero1
        return config

    calibration = Calibration.of(make(), (2, 4))
    times = [seconds(config, truth) for config in calibration.configs]
    forward = 4 * (8 * entry.forward_s + entry.edges_s / 3)
    about = {name: getattr(truth, name) for name in ("machine", "jax_version", "date")}
    found = calibration.fit(times, forward, about)
    for config in (
        make(MeshConfig(data=2)),
        make(MeshConfig(data=2, pipe=2)),
        make(MeshConfig(pipe=4), PipelineConfig("zb_h1", num_microbatches=8)),
        make(MeshConfig(pipe=2), PipelineConfig("interleaved_1f1b", 2, 4)),
        make(MeshConfig(pipe=4), PipelineConfig(num_microbatches=8, semantics="2bw")),
    ):
        assert seconds(config, found) == pytest.approx(seconds(config, truth), rel=1e-4)


def test_no_part_of_a_step_is_below_zero():
    """Noise that would make embedding and head negative leaves them at 0."""
    configs = [make_config(pipeline=PipelineConfig(num_microbatches=m), num_layers=n) for n in (2, 8) for m in (1, 4)]
    noisy = [1.0, 3.0, 4.5, 15.0]
    parts = fit_parts([Run(config, time) for config, time in zip(configs, noisy, strict=True)])
    assert min(parts) == 0 < parts.layer
