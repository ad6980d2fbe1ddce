"""The command `fiddlex`, in fresh interpreters: its list, its version, its sub-commands, mistakes in their names."""

import importlib.metadata
import os
import pathlib
import platform
import re
import subprocess
import sys
from collections.abc import Mapping

import pytest

import fiddlex
from fiddlex import environment
from fiddlex.__main__ import _unknown
from fiddlex.commands import summaries
from tests.programs import EXPERIMENTS, ROOT

COMMANDS = sorted(path.stem for path in (ROOT / "fiddlex" / "commands").glob("[!_]*.py"))
WITHOUT_SCRIPT = {"completion", "configs"}  # of use only where fiddlex is installed


def call(
    *arguments: str, status: int = 0, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "fiddlex", *arguments]
    env = {**os.environ, **(variables or {})}
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, cwd=ROOT, env=env)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    return done


def test_the_list_has_each_command_with_the_first_line_of_its_docstring():
    lines = call().stdout.splitlines()
    assert [name for name, _ in summaries()] == COMMANDS
    for name in COMMANDS:
        first = (ROOT / "fiddlex" / "commands" / f"{name}.py").read_text(encoding="utf-8").splitlines()[0]
        assert f"  {name:<{max(map(len, COMMANDS))}}  {first.strip(chr(34))}" in lines
    assert call("--help").stdout == call("-h").stdout == call("help").stdout == call().stdout


def test_the_version_is_one_block():
    lines = [
        rf"fiddlex   {re.escape(fiddlex.__version__)}( \(revision [0-9a-f]{{12}}(, changed)?\))?",
        rf"jax       {importlib.metadata.version('jax')}",
        rf"jaxlib    {importlib.metadata.version('jaxlib')}",
        r"libtpu    (none|[0-9.]+)",
        rf"Python    {platform.python_version()}",
        rf"platform  {re.escape(platform.platform())}",
        r"devices   1 cpu \(cpu\)",
    ]
    done = call("--version", variables={"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""})
    assert re.fullmatch("\n".join(lines) + "\n", done.stdout)
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("jax", "answer"),
    [
        ("import time; time.sleep(100)", "not known: jax gave no answer within 0.5 s"),
        ("raise RuntimeError('Unable to initialize backend')", "not known: RuntimeError: Unable to initialize backend"),
        ("import os; os.abort()", "not known: jax gave no reason"),
    ],
)
def test_devices_that_cannot_be_reached(jax, answer, tmp_path, monkeypatch):
    (tmp_path / "jax.py").write_text(jax)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    timeout_s = 0.5 if "sleep" in jax else environment.TIMEOUT_S
    assert environment.devices(timeout_s) == answer


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this tree is no checkout")
def test_the_version_has_the_revision_of_a_checkout_only(tmp_path):
    assert re.match(r"fiddlex +0.*revision", environment.describe())
    assert environment._revision(tmp_path) == ""


@pytest.mark.parametrize("arguments", [[], ["--version"], ["trian"], ["train", "--help"], ["plan", "--help"]])
def test_what_runs_nothing_imports_no_jax(arguments):
    code = (
        "import atexit, sys; from fiddlex.__main__ import main\n"
        "atexit.register(lambda: print('jax' in sys.modules, file=sys.stderr))\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT)
    assert done.stderr.endswith("False\n")


@pytest.mark.parametrize("arguments", [[], ["--version"], ["train", "--help"]])
def test_a_full_disk_is_told_in_one_line(arguments):
    with open("/dev/full", "w") as full:
        line = [sys.executable, "-m", "fiddlex", *arguments]
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    program = " ".join(["fiddlex", *arguments[:-1]])
    assert (done.returncode, done.stderr) == (1, f"{program}: [Errno 28] No space left on device\n")


@pytest.mark.parametrize("name", ["version", "--verison", "-v", "-V"])
def test_other_words_for_the_version(name):
    assert _unknown(name, COMMANDS) == f"there is no command {name!r}. Did you mean fiddlex --version?"
    assert "version" not in _unknown("--verbose", COMMANDS)


def test_a_command_is_the_same_program_as_its_script(tmp_path):
    wrong = "--name=1f1b", "--pipe=0", "--microbatches=8"
    script = subprocess.run([sys.executable, EXPERIMENTS / "schedule.py", *wrong], capture_output=True, text=True)
    by_name = call("schedule", *wrong, status=script.returncode)
    assert script.stderr.startswith("schedule.py: schedule 1f1b: --pipe=0 ")
    assert by_name.stderr == script.stderr.replace("schedule.py: ", "fiddlex schedule: ", 1)


@pytest.mark.parametrize("name", sorted({*COMMANDS} - WITHOUT_SCRIPT))
def test_each_command_has_a_script(name):
    assert f"from fiddlex.commands.{name} import main\n" in pathlib.Path(EXPERIMENTS / f"{name}.py").read_text()


def test_the_help_of_a_command_is_that_of_its_script():
    script = subprocess.run([sys.executable, EXPERIMENTS / "train.py", "--help"], capture_output=True, text=True)
    assert script.stdout == call("train", "--help").stdout
    assert re.search(r"\n  --workdir +required: directory of the run\n", script.stdout)
