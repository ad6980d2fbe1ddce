"""The first pages for the three kinds of user: their tables, functions and commands are what the programs take."""

import re
import shlex
from pathlib import Path

import pytest

from fiddlex.schedules.generators import make_schedule
from fiddlex.schedules.schedule import Kind
from tests import programs
from tests.programs import ROOT

SCHEDULE = (ROOT / "docs" / "start_schedule.md").read_text(encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder in which the page's table and function are."""
    (tmp_path / "mine.csv").write_text(SCHEDULE.split("cat /tmp/mine.csv\n")[1].split("```")[0])
    (tmp_path / "mine.py").write_text(SCHEDULE.split("<!-- own-function -->\n```python\n")[1].split("```")[0])
    return tmp_path


def commands() -> list[str]:
    """The command lines of `schedule.py` and `plan.py` on the page; where a cell has flags alone, with the table."""
    lines = [line for line in SCHEDULE.splitlines() if line.startswith(".venv/bin/python experiments/schedule.py")]
    lines += re.findall(r"`((?:schedule|plan)\.py --[^`]*)`", SCHEDULE)
    lines += [
        f"schedule.py --name=file:/tmp/mine.csv {flags}" for flags in re.findall(r"\| `(--costs=[^`]*)`", SCHEDULE)
    ]
    return [line.removeprefix(".venv/bin/python experiments/") for line in lines]


def test_the_table_is_what_the_command_writes(folder: Path) -> None:
    written = programs.call("schedule", "--name=1f1b", "--pipe=3", "--microbatches=4", "--format=csv").stdout
    assert (folder / "mine.csv").read_text() == written


def test_the_function_has_twice_the_warmup_of_1f1b(folder: Path) -> None:
    for pipe in (1, 2, 4):
        ours, theirs = (
            make_schedule(name, pipe=pipe, num_microbatches=16) for name in (f"{folder}/mine.py:mine", "1f1b")
        )
        warmups = [
            [[action.kind for action in row].index(Kind.B) - 1 for row in schedule.actions]
            for schedule in (ours, theirs)
        ]
        assert warmups[0] == [2 * warmup for warmup in warmups[1]]


def test_the_page_has_its_commands() -> None:
    assert [sum(command.startswith(name) for command in commands()) for name in ("schedule.py", "plan.py")] == [7, 1]


@pytest.mark.parametrize("command", commands())
def test_commands_with_schedules_run_as_they_are_written(command: str, folder: Path) -> None:
    name, *arguments = shlex.split(command.replace("/tmp/", f"{folder}/"))
    stderr = programs.call(name.removesuffix(".py"), *arguments, cwd=ROOT).stderr
    assert stderr == (f"{folder}/mine.svg is written.\n" if "--output=" in command else "")
