"""The study of a GPU at hand: its parts on the CPU, what it makes of failures, and its tables."""

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.on_device import flash, report, speed
from experiments.on_device.kernels import CASES
from experiments.on_device.machine import machine
from experiments.on_device.memory import facts
from experiments.on_device.report import NOT_MEASURED, WANTED, document
from experiments.on_device.sizes import SIZES, config_of, write_tokens
from experiments.on_device.study import Record, Study
from experiments.on_device.suite import Chosen, run_tests
from fiddlex.config import Config
from fiddlex.costs.sizes import num_parameters
from fiddlex.errors import DeviceError
from fiddlex.hardware.flash import flash_kernel
from tests.programs import ROOT, call
from tests.test_against import fake

HERE = {"device_kind": "a GPU", "platform": "gpu", "cores": 4, "driver": "driver 1", "versions": {"jax": "1"}}


@pytest.fixture
def config(tmp_path: pathlib.Path) -> Config:
    write_tokens(tmp_path / "tokens.bin", SIZES["tiny"].vocab_size)
    return config_of(SIZES["tiny"], 32, dtype="bfloat16", tokens=tmp_path / "tokens.bin")


def test_a_failed_part_stops_no_other_and_is_repeated(tmp_path: pathlib.Path) -> None:
    calls: list[str] = []

    def part(name: str, answer: Any) -> Any:
        def function() -> Record:
            calls.append(name)
            if isinstance(answer, Exception):
                raise answer
            return dict(answer)

        return function

    def run(second: Any, **inputs: int) -> Study:
        study = Study(tmp_path / "results.jsonl", HERE, lambda records: None)
        study.measure("flash", "first", inputs, part("first", {"kernel": "cudnn"}))
        study.measure("flash", "second", {}, part("second", second))
        study.measure("flash", "third", {}, part("third", {"skipped": "there is none"}))
        return study

    assert run(MemoryError()).failed == ["flash, second"]
    assert calls == ["first", "second", "third"]
    assert run({"error": "too far"}).failed == ["flash, second"]
    assert run({"kernel": "cudnn"}, rounds=2).failed == []
    assert run({"kernel": "cudnn"}, rounds=2).failed == []
    assert calls[3:] == ["second", "first", "second"]
    lines = list(map(json.loads, (tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()))
    assert [line.get("error") for line in lines] == [None, "MemoryError()", None, "too far", None, None]
    assert all(line["machine"] == HERE for line in lines)
    Study(tmp_path / "results.jsonl", HERE | {"driver": "driver 2"}, lambda records: None).measure(
        "flash", "third", {}, part("elsewhere", {})
    )
    assert calls[-1] == "elsewhere"


@pytest.mark.parametrize(
    ("dtype", "scale", "error"),
    [
        ("bfloat16", 1.0, ""),
        ("bfloat16", 1.1, "too far from the oracle: y, dq, dk"),
        ("float32", 1.0, ""),
        ("float32", 1.0001, "too far from the oracle: y, dq, dk, dv"),
        ("bfloat16", np.nan, "too far from the oracle: y, dq, dk, dv"),
    ],
)
def test_a_kernel_is_compared_with_all_scores(
    dtype: str, scale: float, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is attention of jax's own, with wrong keys where `scale` is not 1."""

    def kernel(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None) -> jax.Array:
        assert segments is None
        return jax.nn.dot_product_attention(q, jnp.asarray(scale, k.dtype) * k, v, is_causal=True)

    monkeypatch.setattr(flash, "make_kernel", lambda config, mesh: kernel)
    found = flash.compare(flash.case_config(dtype, 64, 64, flash.CAUSAL), flash.CAUSAL)
    assert found.get("error", "").startswith(error)
    assert bool(error) == ("error" in found)
    assert [len(found[name]) for name in ("kernel_errors", "open_errors")] == [4, 4]


@pytest.mark.parametrize(("dtype", "length", "width", "kind"), CASES["cuda"])
def test_gpus_have_a_kernel_for_the_cases(dtype: str, length: int, width: int, kind: str) -> None:
    config = flash.case_config(dtype, length, width, kind)
    assert bool(flash_kernel("gpu", config, capability=9).name) == (dtype == "bfloat16")


def test_memory_is_predicted_and_assigned(config: Config) -> None:
    found = facts(config)
    assert found["predicted_bytes"] == pytest.approx(1.0e6, rel=0.01)
    assert 0.9 < found["xla_bytes"] / found["predicted_bytes"] < 1.5  # of a very small model; versions of jax differ
    assert "attention runs without a flash kernel: that of CPUs, blocked, cuts" in found["attention"]


def test_sizes_are_those_of_the_published_models(tmp_path: pathlib.Path) -> None:
    small, large = (config_of(SIZES[n], 1024, dtype="bfloat16", tokens=tmp_path / "none") for n in ("small", "1.3b"))
    assert num_parameters(small) == pytest.approx(124.4e6, rel=1e-3)
    assert num_parameters(large) == pytest.approx(1.313e9, rel=1e-3)
    assert {seq_len for _, seq_len in WANTED} == {1024, 2048}


def options(**changes: Any) -> speed.Options:
    values = {"device": "cpu", "device_kind": "NVIDIA H100 80GB HBM3", "dtype": "bfloat16", "rounds": 2, "steps": 1}
    return speed.Options(**values | {"against": (), "pythons": {}, "clones": {}} | changes)


def test_where_another_system_fails_fiddlex_is_measured(
    config: Config, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drivers are fake; fiddlex's losses are those of float32 up to 0.1%."""
    monkeypatch.setattr(speed, "ask", lambda *_, **__: fake(tmp_path, "float32", loss="3"))
    asked = [fake(tmp_path, "fiddlex", loss="3.003"), fake(tmp_path, "other", loss="3.001", dies_after=6)]
    found = speed.measure_speed(config, SIZES["tiny"], asked, options())
    assert found["error"].startswith("other ended with status 1")
    (system,) = found["systems"]
    assert system["from_float32"] == pytest.approx(1e-3)
    assert system["peak_bytes"] == 8e9
    assert 0 < system["mfu"] < 1e-3


def test_fiddlex_is_measured_where_its_run_in_float32_fails(
    config: Config, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "ask", lambda *_, **__: fake(tmp_path, "float32", dies_after=1))
    found = speed.measure_speed(config, SIZES["tiny"], [fake(tmp_path, "fiddlex"), fake(tmp_path, "other")], options())
    assert found["error"].startswith("float32 ended with status 1")
    assert [(system["name"], system["from_float32"]) for system in found["systems"]] == [
        ("fiddlex", None),
        ("other", None),
    ]


def test_results_of_tests_are_counted(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "test_some.py"
    path.write_text(
        "import os, pytest, warnings\n"
        "def test_good(): warnings.warn('a warning of a library')\n"
        "def test_bad(): assert os.environ['JAX_PLATFORMS'] == 'cuda'\n"
        "@pytest.mark.skip(reason='not here')\n"
        "def test_left_out(): pass\n"
    )
    found = run_tests(Chosen("some", str(path)), "cuda")
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 1, 1)  # it does not run on the device
    assert found["error"] == "failed: test_bad"
    assert found["reasons"] == ["not here"]
    assert run_tests(Chosen("some", str(path), on_device=True), "cuda")["passed"] == 2
    assert run_tests(Chosen("some", str(path), "nothing"), "cuda")["error"] == "no test was chosen"


def test_tables_have_what_was_measured_and_what_was_not() -> None:
    key = {"machine": HERE, "inputs": {}, "date": "2026-01-01", "seconds": 1.0}
    result = {"name": "fiddlex", "versions": "fiddlex 1", "tokens_per_second": 1e5, "step_time_s": 1.25, "mfu": 0.412}
    result |= {"quartiles_s": [1.2, 1.3], "peak_bytes": 12_300_000_000, "from_float32": 2e-4}
    records = [
        key | {"stage": "memory", "name": "small 1024 bfloat16", "predicted_bytes": 11e9, "xla_bytes": 12e9},
        key
        | {"stage": "speed", "name": "small 1024 bfloat16", "systems": [result], "missing": {"nanogpt": "no\nclone"}},
        key | {"stage": "flash", "name": "causal", "kernel": "", "skipped": "cuDNN has none"},
        key | {"stage": "tests", "name": "some", "passed": 3, "failed": 1, "skipped": 0, "error": "failed: test_it"},
    ]
    text = document(records)
    assert "## a GPU\n\ndriver 1; 4 cores; jax 1\n\nMeasured from 2026-01-01 to 2026-01-01. fiddlex 1\n" in text
    start = "| GPT-2 small, 124M, bfloat16 | 1,024 |"
    assert f"{start} fiddlex | 100,000 | 1.25 | 1.2 – 1.3 | 41.2% | 11 | 12 | 12.3 | 2.0e-04 |\n" in text
    assert f"{start} nanogpt-compile | {NOT_MEASURED} |" in text
    assert "- speed, small 1024 bfloat16: nanogpt is left out: no clone\n" in text
    assert "| causal | – | – | – | cuDNN has none |" in text
    assert "- tests, some: failed: test_it\n" in text


def test_the_tables_of_the_docs_are_of_the_results() -> None:
    lines = (ROOT / "docs/studies/gpu.jsonl").read_text(encoding="utf-8").splitlines()
    records, text = list(map(json.loads, lines)), (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    for table in (report.sizes_table(records, WANTED), report.kernels_table(records), report.tests_table(records)):
        assert table in text


def test_a_machine_without_a_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceError, match=r"(?s)no cuda device.*JAX_PLATFORMS='cuda'.*--device=cpu --sizes=tiny"):
        machine("cuda")


def test_a_file_of_results_that_cannot_be_written_is_told_before_anything_is_measured(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    done = call("experiments.gpu", "--device=cpu", f"--results={tmp_path}/file/results.jsonl", status=2)
    assert "file/results.jsonl cannot be written: " in done.stderr
    assert "begins" not in done.stderr


def test_a_study_of_nothing_is_a_mistake(tmp_path: pathlib.Path) -> None:
    for flag, names in (("stages", "tests, flash, sizes"), ("sizes", "tiny, small, 1.3b")):
        done = call("experiments.gpu", "--device=cpu", f"--results={tmp_path}/r.jsonl", f"--{flag}=", status=2)
        assert f"--{flag}=: name some of {names}." in done.stderr


@pytest.mark.long
def test_tiny_sizes_run_from_end_to_end_on_the_cpu(tmp_path: pathlib.Path) -> None:
    arguments = ["--device=cpu", "--sizes=tiny", "--rounds=2", "--steps=1", f"--results={tmp_path}/results.jsonl"]
    done = call("experiments.gpu", *arguments, "--stages=sizes", "--dtype=float32")
    assert done.stdout.strip() == (tmp_path / "results.md").read_text(encoding="utf-8").strip()
    assert "| tiny, float32 | 32 | fiddlex |" in done.stdout
    assert "nanogpt-compile is left out: --against=nanogpt-compile: " in done.stdout
    again = call("experiments.gpu", *arguments, "--stages=sizes", "--dtype=float32")
    assert "speed, tiny 32 float32: is there already." in again.stderr


@pytest.mark.long
def test_the_kernel_and_bfloat16_run_from_end_to_end_on_the_cpu(tmp_path: pathlib.Path) -> None:
    arguments = ["--device=cpu", "--sizes=tiny", "--rounds=2", "--steps=1", f"--results={tmp_path}/results.jsonl"]
    text = call("experiments.gpu", *arguments, "--stages=flash,sizes").stdout
    assert "| tiny, bfloat16 | 32 | fiddlex |" in text
    assert text.count("| blocked |") == 2
