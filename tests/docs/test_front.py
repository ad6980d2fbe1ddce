"""What a visitor of the repository meets: the README, the public CI and the forms of issues."""

import pathlib
import re
import subprocess
import tomllib
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.programs import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def test_the_readme_is_a_page_with_both_commands():
    assert len(README.split()) <= 1000
    for marker in ("train-command", "test-command"):
        assert re.search(rf"^<!-- {marker} -->\n```sh\npython3 -m venv \.venv && .+\n```$", README, flags=re.MULTILINE)
    assert re.search(r"^!\[.+\]\(docs/pictures/.+\.svg\)$", README, flags=re.MULTILINE)


def test_notebooks_are_listed():
    listed = re.findall(r"\.\./(experiments/notebooks/\w+\.ipynb)", (ROOT / "docs" / "notebooks.md").read_text())
    assert sorted(listed) == sorted(f"experiments/notebooks/{path.name}" for path in ROOT.glob("experiments/*/*.ipynb"))


def test_commands_are_listed():
    text = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    for path in ROOT.glob("fiddlex/commands/[!_]*.py"):
        if (ROOT / "experiments" / path.name).exists():
            assert f"`experiments/{path.name}" in text


def test_configs_are_listed():
    text = (ROOT / "docs" / "configs.md").read_text(encoding="utf-8")
    for path in ROOT.glob("configs/*.py"):
        assert re.search(rf"`(configs/)?{re.escape(path.name)}[:`]", text)


@pytest.fixture
def workflow() -> dict[Any, Any]:
    return yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))


def test_the_workflow_runs_ci_on_the_oldest_and_the_newest(workflow: dict[Any, Any]) -> None:
    job = workflow["jobs"]["ci"]
    rows = job["strategy"]["matrix"]["include"]
    assert rows[0]["python"] == PROJECT["requires-python"].removeprefix(">=")
    supported = next(Requirement(each) for each in PROJECT["dependencies"] if each.startswith("jax>")).specifier
    for row in rows:
        assert f"Programming Language :: Python :: {row['python']}" in PROJECT["classifiers"]
        assert row["python"] in SpecifierSet(PROJECT["requires-python"])
        wanted = Requirement(row["jax"]).specifier
        versions = [f"0.{minor}.{patch}" for minor in range(20) for patch in range(3)]
        assert [version for version in versions if version in wanted and version in supported]
    assert Requirement(rows[0]["jax"]).specifier.contains("0.10.2")
    assert not Requirement(rows[1]["jax"]).specifier.contains("0.10.2")
    steps = {step["run"]: step for step in job["steps"] if "run" in step}
    assert [*steps][:2] == ["echo '${{ matrix.jax }}' > constraints.txt", ".ci/run"]
    assert steps[".ci/run"]["env"]["PIP_CONSTRAINT"] == "${{ github.workspace }}/constraints.txt"
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


SKIPPED = "SKIPPED [4] {}: it is not installed"
# Makes an environment whose programs print what pytest reports.
VENV = """#!/usr/bin/env bash
mkdir -p "$3/bin"
for name in python pip pytest; do
    printf '#!/usr/bin/env bash\\necho "$REPORT"\\n' >"$3/bin/$name"
    chmod +x "$3/bin/$name"
done
"""


@pytest.mark.parametrize(
    ("skipped", "status"),
    [
        ("tests/launch/test_slurm.py", 1),
        ("tests/interop/test_transformers.py:61", 1),
        ("tests/launch/test_job_files.py:41", 0),
    ],
)
def test_the_weekly_tier_fails_where_its_comparisons_are_skipped(
    skipped: str, status: int, tmp_path: pathlib.Path
) -> None:
    assert (ROOT / skipped.partition(":")[0]).exists()
    (tmp_path / "python3").write_text(VENV)
    (tmp_path / "python3").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "TMPDIR": str(tmp_path)}
    environment["REPORT"] = f"{SKIPPED.format(skipped)}\njax==0.11.2"
    done = subprocess.run([ROOT / ".ci" / "weekly", "peers"], env=environment, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    assert ("these tests must not be skipped" in done.stderr) == bool(status)


def test_the_weekly_workflow_is_root_for_slurm() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "weekly.yml").read_text(encoding="utf-8"))
    runs = {step["run"]: step.get("if") for step in workflow["jobs"]["weekly"]["steps"] if "run" in step}
    (as_root,) = (command for command in runs if command.endswith(".ci/weekly peers"))
    assert as_root.startswith("sudo -E env ")
    assert runs[as_root] == "matrix.part == 'peers'"
    assert runs[".ci/weekly ${{ matrix.part }}"] == "matrix.part != 'peers'"


def test_ci_builds_the_site():
    assert ".venv/bin/mkdocs build --strict" in (ROOT / ".ci" / "run").read_text().splitlines()
    test = " ".join(PROJECT["optional-dependencies"]["test"])
    assert "docs" in re.findall(r"fiddlex\[([^\]]*)\]", test)[0].split(",")


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_each_form_asks_for_the_version(form: pathlib.Path) -> None:
    content = yaml.safe_load(form.read_text(encoding="utf-8"))
    assert content["name"]
    assert content["description"]
    fields = [each for each in content["body"] if each["type"] == "textarea"]
    assert len({each["id"] for each in fields}) == len(fields)
    (version,) = (each for each in fields if each["id"] == "version")
    assert "`fiddlex --version`" in version["attributes"]["label"]
    assert version["validations"]["required"]


def test_there_are_forms_for_bugs_features_and_questions():
    assert [form.stem for form in FORMS] == ["bug", "feature", "question"]
