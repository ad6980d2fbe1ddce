import dataclasses
import math
import pathlib
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fiddlex.errors import ConfigError
from fiddlex.hardware.topology import LIBTPU_DEVICES_PER_CHIP, catalogue, host_for, load_topology, table

ROOT = pathlib.Path(__file__).parents[2]
A100 = load_topology("a100_80")


# ---- the catalogue


def test_catalogue_is_the_files():
    assert catalogue() == tuple(sorted(path.stem for path in (ROOT / "fiddlex" / "hardware" / "topologies").iterdir()))
    assert {"v100_16", "a100_80", "h100", "tpu_v5e"} < set(catalogue())


@pytest.mark.parametrize("name", catalogue())
def test_every_figure_has_a_source_and_every_price_a_day(name):
    topology = load_topology(name)
    assert topology.name == name
    parts = (topology.chip, *topology.links, topology.host, topology.price, topology.hosts)
    assert all(len(part.source.split()) >= 5 for part in parts if part)
    assert topology.links[-1].devices == 0
    assert topology.chip.peak("float32") <= topology.chip.peak("float16" if name == "v100_16" else "bfloat16")
    # Units: a chip computes 10 to 1000 operations while it reads a byte, and reads faster than it sends.
    assert 10 < topology.chip.peak("float32") / topology.chip.memory_bandwidth < 1000
    bandwidths = [topology.chip.memory_bandwidth, *(link.bandwidth for link in topology.links)]
    assert bandwidths == sorted(bandwidths, reverse=True)
    assert topology.chip.memory_bytes == int(topology.chip.memory_gib * 2**30) > 15 * 2**30


@pytest.mark.parametrize("name", catalogue())
def test_a_host_has_more_memory_than_its_devices_and_less_bandwidth(name):
    topology = load_topology(name)
    host = topology.host
    if topology.hosts:
        assert host.devices == topology.hosts.devices * topology.chip.devices_per_chip
    else:
        assert topology.links[0].devices % host.devices == 0
    assert topology.chip.memory_bytes < host.bytes_per_device < 8 * topology.chip.memory_bytes
    assert 1e9 < host.bandwidth < topology.links[0].bandwidth
    pins_any_amount = name.startswith(("tpu_", "trainium"))
    assert host.pinned_gib == (0 if pins_any_amount else 64)
    assert host.limit == (host.bytes_per_device if pins_any_amount else min(host.bytes_per_device, 64 * 2**30))
    if topology.compiler:
        assert host_for(topology.compile_name(8)) == host
    assert topology.host_memory == host


def test_no_host_is_known_of_cpus_and_of_a_topology_without_one():
    assert host_for("cpu") is None
    with pytest.raises(ConfigError, match=r"topology a100_80 has no \[host\].*optimizer\.offload=false"):
        print(dataclasses.replace(A100, host=None).host_memory)


def test_a100_is_that_of_selene():
    # Narayanan et al., SC'21, section 5: eight A100 a server, 312 TFLOP/s each, and as many ports of 200 Gb/s.
    nvlink, infiniband = A100.links
    assert (A100.chip.peak("bfloat16"), A100.chip.peak("float16")) == (312e12, 312e12)
    assert (nvlink.devices, nvlink.bandwidth, infiniband.bandwidth) == (8, 300e9, 25e9)


def test_docs_show_the_catalogue():
    assert table() in (ROOT / "docs" / "topologies.md").read_text(encoding="utf-8")
    printed = subprocess.run(
        [sys.executable, "-m", "fiddlex.hardware.topology"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert printed.stdout == table() + "\n"


def test_a_flag_that_there_is_not_is_refused():
    command = [sys.executable, "-m", "fiddlex.hardware.topology", "--name=h100"]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is no flag --name. This program has none." in done.stderr


# ---- which links a group uses


@pytest.mark.parametrize(
    ("stride", "size", "num_devices", "rings"),
    [
        (1, 1, 0, []),
        (1, 8, 0, [(8, "NVLink 3")]),
        (2, 4, 0, [(4, "NVLink 3")]),
        (1, 16, 0, [(8, "NVLink 3"), (2, "InfiniBand HDR")]),
        (4, 6, 0, [(2, "NVLink 3"), (3, "InfiniBand HDR")]),
        (8, 35, 0, [(35, "InfiniBand HDR")]),
        (1, 3, 0, [(3, "InfiniBand HDR")]),  # devices 6, 7 and 8
        (1, 6, 0, [(2, "NVLink 3"), (3, "InfiniBand HDR")]),  # devices 6 to 11
        (3, 2, 0, [(2, "InfiniBand HDR")]),  # devices 6 and 9
        (1, 3, 6, [(3, "NVLink 3")]),  # all six in one server
        (3, 2, 6, [(2, "NVLink 3")]),
        (1, 3, 12, [(3, "InfiniBand HDR")]),
    ],
)
def test_rings(stride, size, num_devices, rings):
    found = A100.rings(stride, size, num_devices=num_devices)
    assert [(ring.size, ring.link.name) for ring in found] == rings


@given(st.integers(1, 48), st.integers(1, 48), st.sampled_from([(8, 0), (256, 0), (4, 24, 0), (2, 8, 48, 0)]))
def test_no_ring_is_over_a_link_that_does_not_join_it(stride, size, widths):
    links = tuple(dataclasses.replace(A100.links[0], devices=width) for width in widths)
    topology = dataclasses.replace(A100, links=links).validate()
    rings = topology.rings(stride, size)
    assert math.prod(ring.size for ring in rings) == size
    assert all(ring.size > 1 for ring in rings)
    # On each link, every run of as many devices of any such group as have gone into rings so far lies in one group.
    joined = 1
    for ring in rings:
        joined *= ring.size
        for group in range(3):
            for start in range(0, size, joined):
                first = group * stride * size + start * stride
                last = first + (joined - 1) * stride + stride - 1  # with the groups beside it
                link = topology.link_between(first, last)
                assert topology.links.index(link) <= topology.links.index(ring.link)


@given(st.integers(0, 40), st.integers(0, 40))
def test_link_between(first, second):
    same_server = first // 8 == second // 8
    assert A100.link_between(first, second).name == ("NVLink 3" if same_server else "InfiniBand HDR")
    assert A100.link_between(first, second) == A100.link_between(second, first)


def test_a_cluster_has_an_end():
    inner, outer = (dataclasses.replace(link, devices=n) for link, n in zip(A100.links, (4, 64), strict=True))
    topology = dataclasses.replace(A100, links=(inner, outer)).validate()
    assert [ring.size for ring in topology.rings(4, 16)] == [16]
    assert [ring.size for ring in topology.rings(1, 60)] == [4, 15]
    assert [ring.size for ring in topology.rings(1, 3)] == [3]
    message = "no link joins 128 devices; the widest, InfiniBand HDR, joins 64. Take fewer devices, or add a link"
    with pytest.raises(ConfigError, match=message):
        topology.rings(64, 2)
    with pytest.raises(ConfigError, match=message):
        topology.rings(4, 2, num_devices=128)
    assert topology.link_between(63, 0) == outer
    with pytest.raises(ConfigError, match="no link joins devices 0 and 64; the widest, InfiniBand HDR, joins 64"):
        topology.link_between(0, 64)


# ---- names for the compiler


@pytest.mark.parametrize(
    ("name", "num_devices", "expected"),
    [
        ("h100", 1, "gpu:h100:1x1"),
        ("h100", 4, "gpu:h100:1x4"),
        ("h100", 1024, "gpu:h100:128x8"),
        ("tpu_v5e", 1, "tpu:v5e:1x1"),
        ("tpu_v5e", 8, "tpu:v5e:2x4"),
        ("tpu_v6e", 256, "tpu:v6e:16x16"),
        ("tpu_v5p", 4, "tpu:v5p:2x2x1"),
        ("tpu_v5p", 32, "tpu:v5p:2x4x4"),
        ("tpu_v5p", 128, "tpu:v5p:4x4x8"),
        ("tpu_v5p", 1536, "tpu:v5p:8x12x16"),
        ("tpu_v5p", 6144, "tpu:v5p:16x16x24"),
        ("tpu_v4", 4096, "tpu:v4:16x16x16"),
        ("tpu_v6e", 512, "tpu:v6e:16x16:2"),
        ("tpu_v5p", 18432, "tpu:v5p:16x16x24:3"),
        ("tpu_7x", 8, "tpu:tpu7x:2x2x1"),
        ("tpu_7x", 128, "tpu:tpu7x:4x4x4"),
        ("tpu_7x", 36864, "tpu:tpu7x:16x24x24:2"),
        ("gb200", 2, "gpu:gb200:1x2"),
        ("gb200", 144, "gpu:gb200:36x4"),
    ],
)
def test_compile_name(name, num_devices, expected):
    assert load_topology(name).compile_name(num_devices) == expected


@pytest.mark.parametrize(
    ("name", "num_devices"),
    [
        ("h100", 12),
        ("tpu_v5e", 2),
        ("tpu_v5e", 6),
        ("tpu_v6e", 384),
        ("tpu_v5p", 1),
        ("tpu_v5p", 96),
        ("tpu_v5p", 6208),
        ("tpu_7x", 4),
        ("tpu_7x", 9),
        ("gb200", 6),
    ],
)
def test_what_is_no_cluster_has_no_name(name, num_devices):
    with pytest.raises(ConfigError, match=f"{num_devices} devices of {name} are no cluster that can be compiled for"):
        load_topology(name).compile_name(num_devices)


def test_nothing_compiles_for_a_topology_without_a_compiler():
    with pytest.raises(ConfigError, match=r"topology a100_80 has no \[compiler\]"):
        dataclasses.replace(A100, compiler=None).compile_name(8)


def test_libtpu_knows_the_slices():
    pytest.importorskip("libtpu")
    counts = {"tpu_v4": (4, 128), "tpu_v5e": (1, 8, 256), "tpu_v5p": (4, 8, 64, 192), "tpu_v6e": (4, 32)}
    counts["tpu_7x"] = (8, 128)
    names = [(load_topology(name).compile_name(n), str(n)) for name, numbers in counts.items() for n in numbers]
    # Those without a file: four chips of each kind.
    names += [(f"tpu:{name}:2x2", str(4 * LIBTPU_DEVICES_PER_CHIP[name])) for name in ("v2", "v3")]
    code = """
import sys
from fiddlex.config import MeshConfig
from fiddlex.cluster.mesh import make_topology_mesh
for name, count in zip(sys.argv[1::2], sys.argv[2::2]):
    make_topology_mesh(MeshConfig(data=int(count)), name)
"""
    done = subprocess.run([sys.executable, "-c", code, *sum(names, ())], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
