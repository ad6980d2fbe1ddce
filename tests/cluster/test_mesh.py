"""The mesh puts the devices of a slice or host together, and lets the outermost axis cross first."""

import math
import types
from typing import Any

import numpy as np
import pytest

from fiddlex.cluster.mesh import _grid, _slices_along, granules, make_mesh, make_topology_mesh
from fiddlex.config import MeshConfig
from fiddlex.errors import ConfigError, DeviceError


def gpus(hosts: int, per_host: int, *, per_process: int | None = None, numbered: bool = True) -> list[Any]:
    """GPUs as jax lists them, where rank after rank of a cyclic launcher is on another host."""
    found = []
    for rank in range(hosts * per_host // (per_process or per_host)):
        for _ in range(per_process or per_host):
            number = len(found)
            slice_index = rank % hosts if numbered else 0
            found.append(types.SimpleNamespace(id=number, platform="gpu", slice_index=slice_index, process_index=rank))
    return found


@pytest.mark.parametrize("outermost", ["data", "pipe"])
def test_numbers_run_over_tensor_fastest_and_over_the_outermost_axis_slowest(outermost: str) -> None:
    config = MeshConfig(data=2, pipe=4, tensor=2, outermost=outermost)
    mesh = make_mesh(MeshConfig(data=2, pipe=2, tensor=2, outermost=outermost))
    assert mesh.shape == {"data": 2, "pipe": 2, "tensor": 2}
    assert mesh.devices[0, 0, 1].id - mesh.devices[0, 0, 0].id == 1
    far = mesh.devices[1, 0, 0] if outermost == "data" else mesh.devices[0, 1, 0]
    assert far.id - mesh.devices[0, 0, 0].id == 4
    strides = [config.stride(axis) for axis in ("data", "pipe", "tensor")]
    assert strides == ([8, 2, 1] if outermost == "data" else [2, 4, 1])


@pytest.mark.parametrize("per_process", [1, 2, 4])
@pytest.mark.parametrize(("outermost", "axis"), [("data", 0), ("pipe", 1)])
def test_hosts_are_blocks_whatever_the_order_of_the_ranks(outermost: str, axis: int, per_process: int) -> None:
    config = MeshConfig(data=2, pipe=2, tensor=2, outermost=outermost)
    grid = _grid(config, gpus(2, 4, per_process=per_process))
    hosts = np.vectorize(lambda device: device.slice_index)(grid)  # along the outermost axis first
    assert (hosts == np.arange(2)[:, None, None]).all()
    assert axis == ("data", "pipe").index(config.placement_order[0])


def test_without_numbered_slices_processes_are_hosts_of_gpus_but_not_of_tpus() -> None:
    devices = gpus(2, 2, numbered=False)
    assert granules(devices) == [0, 0, 1, 1]
    for device in devices:
        device.platform = "tpu"
    assert granules(devices) == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("config", "num_slices", "along"),
    [
        (MeshConfig(4, 4, 2), 2, [2, 1, 1]),
        (MeshConfig(4, 4, 2), 8, [4, 2, 1]),
        (MeshConfig(4, 4, 2, outermost="pipe"), 8, [4, 2, 1]),
        (MeshConfig(2, 6, 2, outermost="pipe"), 3, [3, 1, 1]),
        (MeshConfig(1, 1, 8), 4, [1, 1, 4]),
        (MeshConfig(2, 3, 2), 6, [2, 3, 1]),
    ],
)
def test_the_outermost_axis_takes_the_slices_first(config: MeshConfig, num_slices: int, along: list[int]) -> None:
    assert _slices_along(config, num_slices) == along
    assert math.prod(along) == num_slices


def test_slices_that_no_axis_can_take_whole_are_refused() -> None:
    message = (
        r"mesh data=4 × pipe=6 × tensor=1 with mesh.outermost=data cannot be placed on 6 slices: mesh.data=4 must "
        r"divide the 6 slices left for it, or be a multiple of them. Choose such a mesh.data, or mesh.outermost=pipe."
    )
    with pytest.raises(DeviceError, match=message):
        _slices_along(MeshConfig(4, 6, 1), 6)
    with pytest.raises(ConfigError, match=r"mesh.outermost='tensor' is not one of data, pipe"):
        MeshConfig(outermost="tensor").validate()


@pytest.mark.parametrize(
    ("topology", "sizes", "outermost", "slices"),
    [
        ("tpu:v5e:2x4:2", (4, 2, 2), "data", (2, 1, 1)),
        ("tpu:v5e:2x4:2", (2, 4, 2), "pipe", (1, 2, 1)),
        ("tpu:v5p:2x2x1:4", (2, 4, 2), "data", (2, 2, 1)),
        ("tpu:v4:2x2x1:4", (4, 2, 2), "pipe", (2, 2, 1)),
    ],
)
def test_slices_of_tpus_are_blocks(
    topology: str, sizes: tuple[int, ...], outermost: str, slices: tuple[int, ...]
) -> None:
    pytest.importorskip("libtpu", reason="compiling for TPUs takes libtpu, of the extra `aot`")
    mesh = make_topology_mesh(MeshConfig(*sizes, outermost=outermost), topology)
    assert mesh.devices.shape == sizes
    found = np.asarray(granules(list(mesh.devices.flat))).reshape(sizes)
    blocks = [np.arange(number).repeat(size // number) for size, number in zip(sizes, slices, strict=True)]
    order = (0, 1) if outermost == "data" else (1, 0)  # the outermost axis varies slowest over the slices
    places = np.meshgrid(*blocks, indexing="ij")
    assert (found == places[order[0]] * slices[order[1]] + places[order[1]]).all()


@pytest.mark.parametrize("slices", ["0", "two", "2x2", "-1"])
def test_a_wrong_number_of_slices_is_refused(slices: str) -> None:
    pytest.importorskip("libtpu", reason="compiling for TPUs takes libtpu, of the extra `aot`")
    with pytest.raises(ConfigError, match=f"topology 'tpu:v5e:2x4:{slices}' must end in its number of slices. Use cpu"):
        make_topology_mesh(MeshConfig(), f"tpu:v5e:2x4:{slices}")


@pytest.mark.parametrize(
    ("variable", "remedy"),
    [
        ("8", "or unset JAX_NUM_CPU_DEVICES=8: fiddlex makes the fake devices itself."),
        (
            "",
            "or take xla_force_host_platform_device_count=64 out of XLA_FLAGS: fiddlex makes the fake devices itself.",
        ),
    ],
)
def test_the_variable_that_jax_obeys_is_blamed(variable: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With both set, jax makes as many devices as JAX_NUM_CPU_DEVICES says."""
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", variable)
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=64")
    with pytest.raises(DeviceError) as error:
        make_mesh(MeshConfig(data=16))
    assert str(error.value).endswith(remedy)
