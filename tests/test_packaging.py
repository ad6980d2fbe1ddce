"""What is published: the wheel in an empty environment, the sdist, the citation, and what a container is built from."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Sequence

import pytest

import fiddlex
from fiddlex.config.files import config_names
from tests.programs import ROOT

BUILT_FROM = ("fiddlex", "configs", "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_citation_is_of_this_version():
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.*)$", text, flags=re.MULTILINE) == [fiddlex.__version__]
    assert re.findall(r"^license: (.*)$", text, flags=re.MULTILINE) == [PROJECT["license"]]


def test_a_container_is_built_from_what_the_wheel_is_built_from():
    rules = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    kept = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    manifest = (ROOT / "MANIFEST.in").read_text(encoding="utf-8")
    included = re.findall(r"^include (.*)$", manifest, flags=re.MULTILINE)[0].split()
    assert kept == {*BUILT_FROM, *included}
    assert all((ROOT / name).exists() for name in kept)


def run(*line: object, cwd: pathlib.Path) -> str:
    """Runs a command without this process's Python path, and returns its standard output."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
    environment |= {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([*map(str, line)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def build(source: pathlib.Path, target: pathlib.Path, *kinds: str) -> Sequence[pathlib.Path]:
    run(sys.executable, "-m", "build", *kinds, f"--outdir={target}", source, cwd=source)
    return sorted(target.iterdir())


def contents(wheel: pathlib.Path) -> dict[str, int]:
    """The files of a wheel with their checksums, without the list of them."""
    with zipfile.ZipFile(wheel) as archive:
        return {each.filename: each.CRC for each in archive.infolist() if not each.filename.endswith("/RECORD")}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of what the wheel is built from, without what earlier builds have left."""
    folder = tmp_path_factory.mktemp("source") / "fiddlex"
    folder.mkdir()
    for name in (*BUILT_FROM, "CHANGELOG.md", "CITATION.cff"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    """The wheel that pip would make of the sdist."""
    _, wheel = sorted(build(source, tmp_path_factory.mktemp("dist")), key=lambda path: path.suffix == ".whl")
    return wheel


def test_beside_a_checkout_python_finds_the_package_in_it(source, tmp_path):
    checkout, python = tmp_path / "fiddlex", tmp_path / "env/bin/python"
    shutil.copytree(source, checkout)
    run(sys.executable, "-m", "venv", "--without-pip", "env", cwd=tmp_path)
    install = "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "-e", checkout
    run(sys.executable, *install, cwd=tmp_path)
    found = run(python, "-c", "import fiddlex; print(fiddlex.__file__)", cwd=tmp_path)
    assert found == f"{checkout}/fiddlex/__init__.py\n"


@pytest.mark.long
def test_the_wheel_has_every_module_and_config_and_nothing_else(wheel, source, tmp_path):
    found = contents(wheel)
    packages = {str(path.relative_to(source)) for path in (source / "fiddlex").rglob("*.*") if path.is_file()}
    expected = packages | {f"fiddlex/configs/{name}.py" for name in config_names()}
    assert {name for name in found if ".dist-info/" not in name} == expected
    (direct,) = build(source, tmp_path, "--wheel")
    assert contents(direct) == found


@pytest.mark.long
def test_the_wheel_works_in_an_empty_environment(wheel, tmp_path):
    run(sys.executable, "-m", "venv", "env", cwd=tmp_path)
    python, command = tmp_path / "env/bin/python", tmp_path / "env/bin/fiddlex"
    run(python, "-m", "pip", "install", "--quiet", wheel, cwd=tmp_path)
    run(python, "-m", "pip", "check", cwd=tmp_path)
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "text.txt").write_text("def add(a, b):\n    return a + b\n\n" * 500)
    assert str(tmp_path) in run(python, "-c", "import fiddlex; print(fiddlex.__file__)", cwd=folder)
    assert run(command, "--version", cwd=folder).startswith(f"fiddlex   {fiddlex.__version__}\n")
    listed = run(command, "configs", cwd=folder)
    assert [line.split()[0] for line in listed.splitlines() if not line.startswith(" ")] == config_names()
    schedule = run(command, "schedule", "--name=zb_h1", "--pipe=2", "--microbatches=4", "--format=json", cwd=folder)
    assert json.loads(schedule)["name"] == "zb_h1"
    assert "_ARGCOMPLETE" in run(command, "completion", "bash", cwd=folder)

    sizes = {"model.hidden_size": 32, "model.seq_len": 32, "data.source": "text:text.txt", "data.eval_batches": 1}
    sizes |= {"train.num_steps": 2, "train.sample_tokens": 0, "train.log_every": 1, "data.global_batch_size": 8}
    overrides = [f"--config.{name}={value}" for name, value in sizes.items()]
    trained = run(command, "train", "--config=gpt_tiny", "--workdir=run", "--format=json", *overrides, cwd=folder)
    assert json.loads(trained.splitlines()[-1])["step"] == 2
    assert run(command, "generate", "--workdir=run", "--prompt=def ", "--num_tokens=4", cwd=folder).startswith("def ")
    assert json.loads(run(command, "evaluate", "--workdir=run", cwd=folder).splitlines()[-1])["step"] == 2
    plan = ["plan", "--config=gpt3:1.7b", "--topology=a100_80", "--num_devices=8", "--write=planned.py"]
    assert "fiddlex compile and fiddlex train" not in run(command, *plan, cwd=folder)
    assert "by fiddlex plan." in (folder / "planned.py").read_text()
    what_if = run(command, "what_if", "--config=planned.py", "--topology=a100_80", "--change=bandwidth*2", cwd=folder)
    assert "bandwidth*2" in what_if
