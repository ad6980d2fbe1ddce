"""The measured profile as a user makes and uses it."""

import dataclasses
import json
import pathlib

import pytest

from fiddlex.planner.profile import load_profile, save_profile
from tests.planner.test_profile import PROFILE
from tests.programs import ROOT, call

CONFIG = [
    f"--config={ROOT}/configs/gpt_tiny.py",
    "--config.model.num_layers=4",
    "--config.model.hidden_size=32",
    "--config.model.seq_len=32",
    "--config.pipeline.schedule=1f1b",
    "--config.pipeline.num_chunks=1",
    "--config.mesh.data=1",
    "--config.mesh.tensor=1",
]


@pytest.mark.long  # eight programs to compile
def test_a_profile_is_measured_and_predicts(tmp_path: pathlib.Path):
    path = tmp_path / "here.json"
    text = call("benchmark", f"--profile={path}", *CONFIG, "--devices=2", "--seconds=0", "--rounds=2").stdout
    profile = load_profile(path)
    assert "tensor 1, recompute none: layer" in text
    assert profile.devices == (1, 2)
    (entry,) = profile.entries
    assert (entry.model.hidden_size, entry.microbatch_size, entry.tensor) == (32, 4, 1)
    asked = ["--change=recompute=full", "--change=mesh.pipe=4", "--format=json"]
    facts = json.loads(call("what_if", f"--profile={path}", *CONFIG, *asked).stdout)
    assert facts["step_time_s"] > 0
    assert facts["changes"][0]["ratio"] > 1
    wide = call("benchmark", f"--profile={tmp_path}/none.json", *CONFIG, "--config.mesh.tensor=2", status=2).stderr
    assert "mesh.tensor=2: a new profile begins with mesh.tensor=1" in wide


def test_what_cannot_be_measured_is_refused_before_it_is(tmp_path: pathlib.Path):
    save_profile(dataclasses.replace(PROFILE, machine="another machine"), tmp_path / "other.json")
    asked = {
        ("--seconds=nan",): "--seconds=nan must be at least 0",
        ("--steps=3",): "there is no flag --steps. Did you mean --rounds=3?",
        (
            f"--profile={tmp_path}/one.json",
            "--config.model.num_layers=1",
            "--config.mesh.pipe=1",
        ): "model.num_layers=1: a profile takes",
        (f"--profile={tmp_path}/other.json",): "other.json is a profile of another machine; this is",
    }
    for flags, message in asked.items():
        stderr = call("benchmark", *CONFIG, *flags, status=2).stderr
        assert message in stderr
        assert "Ready to measure" not in stderr


def test_a_step_is_measured():
    facts = json.loads(call("benchmark", *CONFIG, "--seconds=0", "--rounds=3", "--format=json").stdout)
    low, high = facts["quartiles_s"]
    assert 0 < facts["fastest_step_s"] <= low <= facts["step_time_s"] <= high
    assert facts["num_steps"] == 3
    assert facts["allocated_bytes"] is None  # CPUs do not tell
    assert facts["tokens_per_second"] == pytest.approx(16 * 32 / facts["step_time_s"])


def test_what_bounds_a_run_is_told():
    slow = ["--data", "--seconds=1.2", "--store_latency_ms=20", "--config.mesh.pipe=1", "--config.model.num_layers=1"]
    slow += ["--config.train.num_steps=20_000"]  # epochs enough for a cache
    done = call("benchmark", *CONFIG, *slow, "--format=json")
    assert "the train step of mesh data=1 × pipe=1 × tensor=1, schedule 1f1b, num_microbatches 4." in done.stderr
    facts = json.loads(done.stdout)
    assert facts["bound"] == "fetch"
    assert facts["step_s"] == facts["loader_s"] > facts["devices_s"] > 0
    assert facts["fetch_s"] >= facts["fetch_one_thread_s"] / facts["num_threads"]
    assert any("data.sample_cache_gib" in mend["fields"] for mend in facts["mends"])
    assert facts["epochs"] == pytest.approx(16 * 20_000 / facts["num_samples"])
    for flag, message in {
        "--store_mb_per_s=0": "--store_mb_per_s=0 must be at least 0.001",
        "--store_latency_ms=-1": "--store_latency_ms=-1.0 must be at least 0 and at most 10000",
        "--store_latency_ms=1e9": "--store_latency_ms=1000000000.0 must be at least 0 and at most 10000",
        "--profile=here.json": "--data and --profile=here.json: each is a measurement of its own. Leave one out.",
        "--devices=2": "--devices without --profile: it changes nothing. Add --profile, or leave it out.",
        "--rounds=7": "--rounds with --data: it changes nothing, --data measures for --seconds. Leave it out.",
        "--profile=": "--profile= names no file. Name one, or leave it out.",
    }.items():
        assert message in call("benchmark", *CONFIG, "--data", flag, status=2).stderr
    for flag in ("--store_mb_per_s=100", "--store_latency_ms=0"):
        name = flag.partition("=")[0]
        message = f"{name} without --data: it changes nothing. Add --data, or leave it out."
        assert message in call("benchmark", *CONFIG, flag, status=2).stderr
