"""libtpu is loaded only where there may be a TPU."""

import os
import pathlib
import subprocess
import sys

import jax
import pytest

from fiddlex.cluster import platforms
from tests.small_run import ENVIRONMENT

PROGRAM = """
from fiddlex.cluster.mesh import make_mesh
from fiddlex.cluster.platforms import libtpu_is_loaded
from fiddlex.config import MeshConfig
import jax

print(make_mesh(MeshConfig(data=2)).size, jax.default_backend(), libtpu_is_loaded())
"""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    """A machine with libtpu and without accelerators; returns the folder of its PCI devices."""
    monkeypatch.setattr(platforms, "_TPU_FILES", (str(tmp_path / "accel0"),))
    monkeypatch.setattr(platforms, "_GPU_FILES", (str(tmp_path / "nvidia0"),))
    monkeypatch.setattr(platforms, "_PCI", tmp_path / "pci")
    monkeypatch.setattr(platforms, "_is_installed", lambda name: name == "libtpu")
    monkeypatch.setattr(platforms, "_plugins", lambda: set())
    monkeypatch.delenv("JAX_FORCE_TPU_INIT", raising=False)
    return tmp_path


def left_out(monkeypatch: pytest.MonkeyPatch, named: str = "") -> bool:
    """Whether jax is told to use CPUs alone, after the user has named these platforms."""
    told = []
    monkeypatch.setattr(jax.config, "update", lambda name, value: told.append((name, value)))
    monkeypatch.setattr(platforms, "_named_platforms", lambda: named)
    platforms.leave_out_absent_tpu()
    assert told in ([], [("jax_platforms", "cpu")])
    return bool(told)


def pci(folder: pathlib.Path, vendor: str, kind: str) -> None:
    device = folder / "pci" / "0000:00:04.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "class").write_text(f"{kind}\n")


def test_a_machine_without_accelerators(machine: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert left_out(monkeypatch)
    assert not left_out(monkeypatch, "tpu")
    monkeypatch.setenv("JAX_FORCE_TPU_INIT", "1")
    assert not left_out(monkeypatch)


@pytest.mark.parametrize(
    ("vendor", "kind", "expected"),
    [("0x1ae0", "0x120000", False), ("0x1ae0", "0x020000", True), ("0x8086", "0x120000", True)],
    ids=["tpu", "network card of Google", "another vendor"],
)
def test_devices_on_the_bus(
    vendor: str, kind: str, expected: bool, machine: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pci(machine, vendor, kind)
    assert left_out(monkeypatch) == expected


@pytest.mark.parametrize(
    ("plugins", "file", "expected"),
    [
        (set(), "accel0", False),
        ({"xla_cuda12"}, "", True),
        ({"xla_cuda12"}, "nvidia0", False),
        ({"another"}, "", False),
    ],
)
def test_other_accelerators_are_left_to_jax(
    plugins: set[str], file: str, expected: bool, machine: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platforms, "_plugins", lambda: plugins)
    if file:
        (machine / file).touch()
    assert left_out(monkeypatch) == expected


def test_a_run_on_cpus_does_not_load_libtpu() -> None:
    pytest.importorskip("libtpu", reason="libtpu comes with the extra `aot`")
    if platforms._may_have_tpu() or any(map(os.path.exists, platforms._GPU_FILES)):
        pytest.skip("the machine has accelerators")
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, env=environment)
    assert (done.stdout, done.stderr) == ("2 cpu False\n", "")
