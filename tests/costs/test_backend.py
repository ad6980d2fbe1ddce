"""Which backend a topology has, and which models run in its flash kernel."""

import dataclasses

import pytest

from fiddlex.config import Config, ModelConfig
from fiddlex.costs.backend import GPU, TPU, TPU_V5P, backend_of
from fiddlex.costs.layer_memory import LayerMemory
from fiddlex.hardware.topology import Compiler, catalogue, load_topology

MODEL = ModelConfig(hidden_size=128, num_heads=2, seq_len=128, dtype="bfloat16")


def test_every_topology_has_a_backend() -> None:
    found = {name: backend_of(load_topology(name).compiler) for name in catalogue()}
    assert {name for name, backend in found.items() if backend == TPU} == {"tpu_7x", "tpu_v4", "tpu_v5e", "tpu_v6e"}
    assert found["tpu_v5p"] == TPU_V5P
    assert {name for name, backend in found.items() if backend.capability >= 8} == {
        "a100_40",
        "a100_80",
        "h100",
        "h200",
        "b200",
        "gb200",
    }
    assert found["v100_16"] == dataclasses.replace(GPU, capability=7)


@pytest.mark.parametrize("compiler", [None, Compiler("gpu", "one_of_mine")])
def test_an_unknown_one_has_no_flash_kernel(compiler: Compiler | None) -> None:
    assert backend_of(compiler) == dataclasses.replace(GPU, capability=0)


@pytest.mark.parametrize(
    ("changes", "on_gpus", "on_tpus"),
    [
        ({}, True, True),
        ({"dtype": "float16"}, True, False),
        ({"dtype": "float32"}, False, True),
        ({"dropout": 0.1}, False, False),
        ({"num_heads": 1}, True, True),  # 128 wide
        ({"hidden_size": 144, "num_heads": 1}, False, True),
        ({"hidden_size": 264, "num_heads": 1}, False, False),
        ({"hidden_size": 24}, False, False),  # 12 wide
        ({"hidden_size": 112}, True, False),  # 56 wide
        ({"seq_len": 63}, True, False),
        ({"seq_len": 192}, True, False),
        ({"family": "bert"}, True, True),
        ({"family": "bert", "seq_len": 63}, False, False),  # its mask
    ],
)
def test_which_models_run_in_a_kernel(changes: dict[str, object], on_gpus: bool, on_tpus: bool) -> None:
    model = dataclasses.replace(MODEL, **changes)  # type: ignore[arg-type]
    for backend, name, runs in ((GPU, "cudnn", on_gpus), (TPU, "splash", on_tpus)):
        found = backend.flash_kernel(Config(model=model))
        assert found.name == (name if runs else "")
        assert bool(found.reason) != runs


@pytest.mark.parametrize(("size", "capability", "runs"), [(256, 8, False), (256, 9, True), (264, 9, False)])
def test_wide_heads_run_in_the_kernel_of_newer_gpus(size: int, capability: int, runs: bool) -> None:
    model = dataclasses.replace(MODEL, hidden_size=size, num_heads=1)
    found = dataclasses.replace(GPU, capability=capability).flash_kernel(Config(model=model))
    assert bool(found.name) == runs
    assert runs or f"the model's are {size} wide" in str(found)


def test_the_reason_for_no_kernel_is_told() -> None:
    config = Config(model=dataclasses.replace(MODEL, seq_len=1000))
    assert str(TPU.flash_kernel(config)) == (
        "attention runs without a flash kernel: splash takes model.seq_len in multiples of 128; it is 1000"
    )
    assert str(GPU.flash_kernel(config)) == "attention runs in the flash kernel cudnn"


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_the_kernel_leaves_a_sum_of_each_row_of_scores(recompute: str) -> None:
    config = Config(model=MODEL)
    config.pipeline.recompute, config.data.global_batch_size = recompute, 3
    flash, plain = (
        LayerMemory.of(config, backend).stash() for backend in (GPU, dataclasses.replace(GPU, capability=7))
    )
    rows = 3 * 2 * 128
    assert plain - flash == (rows * 128 * 2 if recompute == "none" else 0) - rows * 4
