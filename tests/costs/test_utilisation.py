"""Rates of a step, and the peak that they are compared with."""

import pathlib

import pytest

from fiddlex.config import Config
from fiddlex.costs.sizes import model_flops
from fiddlex.costs.utilisation import throughput, topology_of
from fiddlex.errors import ConfigError
from fiddlex.hardware.topology import catalogue, load_topology


@pytest.fixture
def config() -> Config:
    config = Config()
    config.mesh.data, config.mesh.tensor, config.model.dtype = 2, 2, "bfloat16"
    return config


def test_a_step_of_known_length_on_a_known_chip(config: Config) -> None:
    rates = throughput(config, "NVIDIA H100 80GB HBM3").rates(0.5)
    flops = model_flops(config) / 4 / 0.5
    assert rates == {
        "step_time_s": 0.5,
        "tokens_per_second": config.tokens_per_step / 0.5,
        "model_tflops_per_device": pytest.approx(flops / 1e12),
        "mfu": pytest.approx(flops / 989e12),
    }
    config.pipeline.recompute = "full"  # adds nothing to the model's own operations
    assert throughput(config, "NVIDIA H100 80GB HBM3").rates(0.5) == rates


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA H100 PCIe", "Tesla V100-SXM2-16GB"])  # V100: no bfloat16
def test_without_a_peak_there_is_no_mfu(kind: str, config: Config) -> None:
    assert "mfu" not in throughput(config, kind).rates(0.5)
    config.train.topology = "a100_80"
    flops = model_flops(config) / 4 / 0.5
    assert throughput(config, kind).rates(0.5)["mfu"] == pytest.approx(flops / 312e12)


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ("h101", r"^train\.topology=h101: topology 'h101' is not in the catalogue\. Did you mean 'h100'\?"),
        ("v100_16", r"^train\.topology=v100_16: .* has no peak_flops for model\.dtype=bfloat16"),
        ("/no/such.toml", r"^train\.topology=/no/such\.toml: .* cannot be read"),
    ],
)
def test_a_topology_without_the_peak_is_refused(topology: str, message: str, config: Config) -> None:
    config.train.topology = topology
    with pytest.raises(ConfigError, match=message):
        throughput(config, "cpu")


def test_each_kind_of_device_is_one_chip() -> None:
    kinds = {kind: load_topology(name).chip for name in catalogue() for kind in load_topology(name).chip.device_kinds}
    assert sum(len(load_topology(name).chip.device_kinds) for name in catalogue()) == len(kinds)
    assert {name for name in catalogue() if not load_topology(name).chip.device_kinds} == {"trainium2"}
    found = {kind: topology_of(Config(), kind) for kind in kinds}
    assert all(found[kind].chip == chip for kind, chip in kinds.items())
    # As jax 0.10.2 has them in jax/_src/pallas/mosaic/tpu_info.py.
    names = {"TPU v4": "TPU v4", "TPU v5 lite": "TPU v5e", "TPU v5": "TPU v5p", "TPU v6 lite": "TPU v6e"}
    assert {kind: kinds[kind].name for kind in names} == names


def test_a_gpu_is_called_as_the_compiler_describes_it() -> None:
    for name in catalogue():
        topology = load_topology(name)
        if topology.compiler and topology.compiler.gpu:
            assert topology.compiler.gpu.description in topology.chip.device_kinds


def test_a_file_of_ones_own_names_its_kinds(tmp_path: pathlib.Path) -> None:
    text = (pathlib.Path(__file__).parents[2] / "fiddlex/hardware/topologies/h100.toml").read_text(encoding="utf-8")
    (tmp_path / "own.toml").write_text(text.replace('["NVIDIA H100 80GB HBM3"]', '"H100"'), encoding="utf-8")
    with pytest.raises(ConfigError, match="device_kinds must be a list"):
        load_topology(str(tmp_path / "own.toml"))
