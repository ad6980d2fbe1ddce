"""The command `fiddlex`, in fresh interpreters: its list, its version, its sub-commands, mistakes in their names."""

import pathlib
import re
import subprocess
import sys

import pytest

import fiddlex
from fiddlex.commands import summaries
from tests.programs import EXPERIMENTS, ROOT

COMMANDS = sorted(path.stem for path in (ROOT / "fiddlex" / "commands").glob("[!_]*.py"))
WITHOUT_SCRIPT = {"completion", "configs"}  # of use only where fiddlex is installed


def call(*arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "fiddlex", *arguments]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, cwd=ROOT)
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


def test_the_version():
    assert call("--version").stdout == f"fiddlex {fiddlex.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["--version"], ["trian"], ["train", "--help"], ["plan", "--help"]])
def test_what_runs_nothing_imports_no_jax(arguments):
    code = (
        "import atexit, sys; from fiddlex.__main__ import main\n"
        "atexit.register(lambda: print('jax' in sys.modules, file=sys.stderr))\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT)
    assert done.stderr.endswith("False\n")


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
