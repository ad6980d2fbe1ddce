"""The study of predicted steps: what its documentation says is what its results say."""

import json

import pytest

from experiments import step_cases
from tests.programs import ROOT, Ended, started

RESULTS = ROOT / "docs/studies/steps.jsonl"


def call(*arguments: str) -> Ended:
    with started("experiments.predicted_steps", *arguments, "--rounds=0", cwd=ROOT) as running:
        return running.wait()


def test_the_documented_tables_are_those_of_the_results():
    printed = call(f"--results={RESULTS}").stdout
    text = (ROOT / "docs/profile.md").read_text()
    rows = [line for line in printed.splitlines() if line]
    assert len(rows) > 2 + len(step_cases.CASES) + len(step_cases.WHAT_IFS)
    assert [row for row in rows if row not in text] == []


def test_no_results_are_refused(tmp_path):
    done = call(f"--results={tmp_path}/none.jsonl")
    assert done.returncode == 2
    assert "there are no results" in done.stderr


def test_the_results_have_at_least_twelve_layouts_that_the_profile_is_not_made_of():
    measured = json.loads(RESULTS.read_text().splitlines()[0])["seconds"]
    made_of = [config for each in step_cases.make_calibrations() for config in each.configs]
    assert set(step_cases.CASES) <= set(measured)
    assert len(step_cases.CASES) >= 12
    assert not any(config in made_of for config in step_cases.CASES.values())


@pytest.mark.parametrize("config", step_cases.CASES.values(), ids=list(step_cases.CASES))
def test_every_layout_is_one_that_trains(config):
    config.validate()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"machine": "64 cores of arm"}, "has rounds of 2 cores of x86_64 and of 64 cores of arm"),
        ({"seconds": {"one device": 1.0}}, "has rounds without "),
    ],
)
def test_rounds_of_other_machines_or_cases_are_not_read_as_one(change, message, tmp_path):
    lines = RESULTS.read_text().splitlines()
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text("\n".join([*lines[:2], json.dumps(json.loads(lines[2]) | change)]) + "\n")
    done = call(f"--results={mixed}")
    assert done.returncode == 2
    assert message in done.stderr
