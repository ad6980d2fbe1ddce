"""Which backend a topology has, and which models run in its flash kernel."""

import dataclasses

import pytest

from fiddlex.cluster.topology import Compiler, catalogue, load_topology
from fiddlex.config import Config, ModelConfig
from fiddlex.costs.backend import GPU, TPU, backend_of
from fiddlex.costs.layer_memory import LayerMemory

MODEL = ModelConfig(hidden_size=128, num_heads=2, seq_len=64, dtype="bfloat16")


def test_every_topology_has_a_backend() -> None:
    found = {name: backend_of(load_topology(name).compiler) for name in catalogue()}
    assert {name for name, backend in found.items() if backend == TPU} == {"tpu_v4", "tpu_v5e", "tpu_v5p", "tpu_v6e"}
    assert {name for name, backend in found.items() if backend.capability >= 8} == {
        "a100_40",
        "a100_80",
        "h100",
        "h200",
        "b200",
    }
    assert found["v100_16"] == dataclasses.replace(GPU, capability=7)


@pytest.mark.parametrize("compiler", [None, Compiler("gpu", "one_of_mine")])
def test_an_unknown_one_has_no_flash_kernel(compiler: Compiler | None) -> None:
    assert backend_of(compiler) == dataclasses.replace(GPU, capability=0)


@pytest.mark.parametrize(
    ("changes", "flash"),
    [
        ({}, True),
        ({"dtype": "float16"}, True),
        ({"dtype": "float32"}, False),
        ({"dropout": 0.1}, False),
        ({"num_heads": 1}, True),  # 128 wide
        ({"hidden_size": 144, "num_heads": 1}, False),
        ({"hidden_size": 24}, False),  # 12 wide
        ({"seq_len": 63}, True),
        ({"family": "bert"}, True),
        ({"family": "bert", "seq_len": 63}, False),  # its mask
    ],
)
def test_which_models_run_in_it(changes: dict[str, object], flash: bool) -> None:
    model = dataclasses.replace(MODEL, **changes)  # type: ignore[arg-type]
    assert GPU.flash_kernel(model) == flash
    assert not TPU.runs_flash(model)


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_the_kernel_leaves_a_sum_of_each_row_of_scores(recompute: str) -> None:
    config = Config(model=MODEL)
    config.pipeline.recompute, config.data.global_batch_size = recompute, 3
    flash, plain = (
        LayerMemory.of(config, backend).stash() for backend in (GPU, dataclasses.replace(GPU, capability=7))
    )
    rows = 3 * 2 * 64
    assert plain - flash == (rows * 64 * 2 if recompute == "none" else 0) - rows * 4
