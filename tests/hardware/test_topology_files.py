import dataclasses
import pathlib

import pytest

from fiddlex.errors import ConfigError
from fiddlex.hardware.chips import HostMemory
from fiddlex.hardware.slices import Hosts
from fiddlex.hardware.topology import Compiler, Topology, catalogue, gpu_targets, load_topology

ROOT = pathlib.Path(__file__).parents[2]
OWN = """
description = "two kinds of links"

[chip]
name = "C"
memory_gib = 80
memory_bandwidth = 2e12
peak_flops = {bfloat16 = 3e14, float32 = 1.5e14}
source = "s"

[[links]]
name = "inner"
devices = 4
bandwidth = 3e11
latency_s = 3e-6
source = "s"

[[links]]
name = "outer"
devices = 64
bandwidth = 25e9
latency_s = 0
source = "s"

[price]
usd_per_device_hour = 3.5
date = 2026-11-22
source = "s"

[compiler]
platform = "tpu"
name = "v9"
torus = 2
"""


def own(tmp_path: pathlib.Path, text: str = OWN) -> Topology:
    (tmp_path / "own.toml").write_text(text, encoding="utf-8")
    return load_topology(str(tmp_path / "own.toml"))


def test_a_file_of_ones_own(tmp_path):
    topology = own(tmp_path)
    assert topology.name == str(tmp_path / "own.toml")
    assert topology.chip.memory_bytes == 80 * 2**30
    assert topology.compiler == Compiler("tpu", "v9", 2)
    assert [link.paths for link in topology.links] == [1, 1]
    bare = own(tmp_path, OWN.split("[price]")[0])
    assert (bare.host, bare.price, bare.compiler) == (None, None, None)
    assert dataclasses.replace(bare, price=topology.price, compiler=topology.compiler) == topology


HOSTS = '[hosts]\ndevices = 4\nalone = 8\naccelerator = "tpu-v9-slice"\nsource = "s"\n'


def test_hosts_of_tpus(tmp_path):
    assert own(tmp_path, OWN + HOSTS).hosts == Hosts(4, 8, "tpu-v9-slice", "s")
    assert own(tmp_path).hosts is None
    with pytest.raises(ConfigError, match=r"hosts\.alone=2 must be at least 4 and below"):
        own(tmp_path, OWN + HOSTS.replace("8", "2"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("v9", "tpu7x", "1 with compiler.name='tpu7x': jax makes 2 devices of each such chip. Set it to 2;"),
        ("v9", "v3", "1 with compiler.name='v3': jax makes 2 devices of each such chip. Set it to 2;"),
        ('name = "C"', 'name = "C"\ndevices_per_chip = 0', "0 must be at least 1 and below 2147483648."),
    ],
)
def test_a_wrong_number_of_devices_of_a_chip(old, new, message, tmp_path):
    with pytest.raises(ConfigError) as raised:
        own(tmp_path, OWN.replace(old, new))
    assert f"chip.devices_per_chip={message}" in str(raised.value)


@pytest.mark.parametrize("name", catalogue())
def test_the_catalogues_tpus_have_hosts(name):
    assert (load_topology(name).hosts is not None) == name.startswith("tpu")


HOST = '[host]\nmemory_gib = 1000\ndevices = 3\nbandwidth = 9e9\npinned_gib = 64\nsource = "s"\n'


def test_the_memory_of_a_host(tmp_path):
    host = own(tmp_path, OWN + HOST).host
    assert host == HostMemory(1000.0, 3, 9e9, "s", 64.0)
    assert host.bytes_per_device == 1000 * 2**30 // 3
    assert own(tmp_path, OWN + HOST.replace("pinned_gib = 64\n", "")).host == dataclasses.replace(host, pinned_gib=0.0)
    both = own(tmp_path, OWN + HOST + HOSTS)
    assert (both.host, both.hosts) == (host, Hosts(4, 8, "tpu-v9-slice", "s"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("memory_gib = 1000", "memory_gib = 0", "memory_gib=0.0 must be greater than 0 and at most 1.04858e+06."),
        ("memory_gib = 1000", "memory_gib = nan", "memory_gib=nan must be greater than 0 and at most 1.04858e+06."),
        ("devices = 3", "devices = 0", "devices=0 must be at least 1 and below 2147483648."),
        ("bandwidth = 9e9", "bandwidth = 0", "bandwidth=0.0 must be greater than 0 and below inf."),
        ("bandwidth = 9e9", "bandwidth = inf", "bandwidth=inf must be greater than 0 and below inf."),
        ("pinned_gib = 64", "pinned_gib = -1", "pinned_gib=-1.0 must be at least 0 and at most 1.04858e+06."),
        ("pinned_gib = 64", "pinned_gib = nan", "pinned_gib=nan must be at least 0 and at most 1.04858e+06."),
    ],
)
def test_the_memory_of_a_host_at_fault(old, new, message, tmp_path):
    with pytest.raises(ConfigError) as raised:
        own(tmp_path, OWN + HOST.replace(old, new))
    assert str(raised.value) == f"topology {tmp_path / 'own.toml'}: host.{message}"


def test_a_mark_ahead_of_a_file_is_passed_over(tmp_path):
    assert own(tmp_path, f"\ufeff{OWN}") == own(tmp_path)


def test_the_form_shown_in_the_docs_is_a_topology(tmp_path):
    text = (ROOT / "docs" / "topologies.md").read_text(encoding="utf-8")
    topology = own(tmp_path, text.split("```toml\n")[1].split("```")[0])
    assert len(topology.links) == 3
    assert topology.host
    assert topology.price
    assert topology.compiler


def test_the_catalogues_files_go_by_their_paths_too():
    path = str(ROOT / "fiddlex" / "hardware" / "topologies" / "h100.toml")
    assert load_topology(path) == dataclasses.replace(load_topology("h100"), name=path)


def test_a_chip_names_the_dtypes_it_has():
    message = (
        "Tesla V100-SXM2-16GB has no peak_flops for model.dtype=bfloat16; it has some for float16, float32. Take one "
        "of these, or add it to a topology file of your own."
    )
    with pytest.raises(ConfigError) as raised:
        load_topology("v100_16").chip.peak("bfloat16")
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("memory_gib = 80", "memory_gb = 80", ": chip has no field 'memory_gb'. Did you mean 'memory_gib'?"),
        ("description", "descripton", " has no field 'descripton'. Did you mean 'description'?"),
        ("description", 'name = "n"\ndescription', " has no field 'name'. Known: description, chip, links, "),
        ("memory_gib = 80\n", "", ": chip lacks memory_gib. It needs name, memory_gib, memory_bandwidth, peak_flops, "),
        ("latency_s = 0\n", "", ": links[1] lacks latency_s. It needs name, devices, bandwidth, latency_s, source."),
        ("date = 2026-11-22\n", "", ": price lacks date. It needs usd_per_device_hour, date, source."),
        ("memory_gib = 80", 'memory_gib = "80"', ": chip.memory_gib='80' is a str; it must be of type float."),
        (
            "memory_gib = 80",
            "memory_gib = 1e308",
            ": chip.memory_gib=1e+308 must be greater than 0 and at most 1.04858e+06.",
        ),
        ("memory_gib = 80", "memory_gib = true", ": chip.memory_gib=True is a bool; it must be of type float."),
        ("memory_gib = 80", "memory_gib = 1" + "0" * 400, ": chip.memory_gib is an integer too large for a float, "),
        ("devices = 4", "devices = 4.0", ": links[0].devices=4.0 is a float; it must be of type int."),
        ("= 2026-11-22", '= "today"', ": price.date='today' is a str; it must be of type date, written as 2026-11-22 "),
        ("= 2026-11-22", "= 2026-11-22T10:00:00", ": price.date=datetime.datetime(2026, 11, 22, 10, 0) is a datetime"),
        ("{bfloat16 = 3e14, float32 = 1.5e14}", "3e14", ": chip.peak_flops must be an object with fields, not 3000000"),
        ("bfloat16 = 3e14", 'bfloat16 = "3e14"', ": chip.peak_flops.bfloat16='3e14' is a str; it must be of type flo"),
        ("bfloat16 =", "bf16 =", ": chip.peak_flops has no dtype 'bf16'. Did you mean 'bfloat16'?"),
        ("bfloat16 = 3e14, float32 = 1.5e14", "", ": chip.peak_flops is empty: give operations/s for one or more of "),
        ("bfloat16 = 3e14", "bfloat16 = 0", ": chip.peak_flops.bfloat16=0.0 must be greater than 0 and below inf."),
        ("memory_bandwidth = 2e12", "memory_bandwidth = nan", ": chip.memory_bandwidth=nan must be greater than 0 "),
        ("bandwidth = 25e9", "bandwidth = -25e9", ": links[1].bandwidth=-25000000000.0 must be greater than 0 and bel"),
        ("bandwidth = 25e9", "bandwidth = inf", ": links[1].bandwidth=inf must be greater than 0 and below inf."),
        ("latency_s = 3e-6", "latency_s = -1", ": links[0].latency_s=-1.0 must be at least 0 and below inf."),
        ("latency_s = 0", "latency_s = 0\npaths = 0", ": links[1].paths=0 must be at least 1 and below 2147483648."),
        (
            "devices = 4",
            "devices = 0",
            ": links[0].devices=0 must be at least 2: links go from the innermost outwards, ",
        ),
        (
            "devices = 4",
            "devices = 1",
            ": links[0].devices=1 must be at least 2: links go from the innermost outwards, ",
        ),
        ("devices = 4", "devices = -4", ": links[0].devices=-4 must be at least 0 and below 2147483648."),
        (
            "devices = 64",
            "devices = 4",
            ": links[1].devices=4 must be a larger multiple of the 4 of links[0]: links go ",
        ),
        (
            "devices = 64",
            "devices = 2",
            ": links[1].devices=2 must be a larger multiple of the 4 of links[0]: links go ",
        ),
        (
            "devices = 64",
            "devices = 6",
            ": links[1].devices=6 must be a larger multiple of the 4 of links[0]: links go ",
        ),
        ("= 3.5", "= 0", ": price.usd_per_device_hour=0.0 must be greater than 0 and below inf."),
        ('"tpu"', '"cuda"', ": compiler.platform='cuda' is not one of gpu, tpu."),
        ("torus = 2", "torus = 4", ": compiler.torus=4 with platform='tpu': it must be 2 or 3, the dimensions of the "),
        ("torus = 2", "", ": compiler.torus=0 with platform='tpu': it must be 2 or 3, the dimensions of the torus "),
        ('"tpu"', '"gpu"', ": compiler.torus=2 with platform='gpu': it must be 0, "),
        ("[chip]", "[chip", " is not TOML: Expected ']' at the end of a table declaration (at line 4, column 6)."),
        ("devices = 64", "devices = ", " is not TOML: Invalid value (at line 20, column 11)."),
        ("devices = 64", "devices = " + "9" * 5000, " is not TOML: Exceeds the limit"),
        ("devices = 64", "devices = " + "[" * 5000, " is not TOML: "),
    ],
    ids=lambda text: text[:40].strip(),
)
def test_a_file_at_fault(old, new, message, tmp_path):
    assert OWN.count(old) == 1
    with pytest.raises(ConfigError) as raised:
        own(tmp_path, OWN.replace(old, new))
    assert str(raised.value).startswith(f"topology {tmp_path / 'own.toml'}{message}")


@pytest.mark.parametrize(
    ("links", "message"),
    [
        ("", " lacks links. It needs description, chip, links."),
        ("links = []\n", ": links is empty: give at least one, from the innermost outwards."),
        ("links = 3\n", ": links must be a list, not 3."),
        ("links = [3]\n", ": links[0] must be an object with fields, not 3."),
        ('links = {name = "n"}\n', ": links must be a list, not {'name': 'n'}."),
    ],
)
def test_links_at_fault(links, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    head, _, rest = OWN.partition("[[links]]")
    pathlib.Path("own.toml").write_text(links + head + rest[rest.index("[price]") :])
    with pytest.raises(ConfigError) as raised:
        load_topology("own.toml")
    assert str(raised.value) == f"topology own.toml{message}"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "a100_8",
            "topology 'a100_8' is not in the catalogue. Did you mean 'a100_80'? A file of your own goes by ",
        ),
        ("../topologies/h100", "topology '../topologies/h100' is not in the catalogue. "),
        (
            "nothere.toml",
            "topology nothere.toml cannot be read: No such file or directory. Give the path of a TOML file.",
        ),
        ("folder.toml", "topology folder.toml cannot be read: Is a directory. Give the path of a TOML file."),
        ("latin.toml", "topology latin.toml is not UTF-8 at byte 15: save it as UTF-8, which TOML is."),
    ],
)
def test_no_such_topology(name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("folder.toml").mkdir()
    pathlib.Path("latin.toml").write_text('description = "ü"', encoding="latin-1")
    with pytest.raises(ConfigError) as raised:
        load_topology(name)
    assert str(raised.value).startswith(message)


def test_a_description_of_a_gpu_has_the_version_of_cuda():
    """Without it XLA has no products of float8: `tests/xla/test_gpu_targets.py`."""
    assert all("runtime_version { major: 12 minor: 9 }" in target.text_proto() for target in gpu_targets().values())


GPUS = {name for name in catalogue() if load_topology(name).compiler and not name.startswith("tpu")}


def test_which_of_the_catalogue_cannot_be_compiled_for():
    without = {name for name in catalogue() if not load_topology(name).compiler}
    assert without == {"h20", "mi300x", "trainium2"}
    assert all(load_topology(name).description.endswith("; nothing can be compiled for it") for name in without)


@pytest.mark.parametrize("name", sorted(GPUS))
def test_what_the_compiler_knows_of_a_gpu_agrees_with_the_catalogue(name):
    topology = load_topology(name)
    assert topology.compiler
    target = topology.compiler.gpu
    assert target == gpu_targets()[topology.compiler.name]
    assert target.memory_bytes == pytest.approx(topology.chip.memory_bytes, rel=0.01)
    assert target.bytes_per_s == pytest.approx(topology.chip.memory_bandwidth, rel=0.01)
