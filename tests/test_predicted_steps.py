"""The study of predicted steps: what its documentation says is what its results say."""

import json

import pytest

from experiments import predicted_steps
from tests.test_binaries import ROOT, call

RESULTS = ROOT / "docs/studies/steps.jsonl"


def test_the_documented_tables_are_those_of_the_results():
    printed = call("predicted_steps", f"--results={RESULTS}", "--rounds=0").stdout
    text = (ROOT / "docs/profile.md").read_text()
    rows = [line for line in printed.splitlines() if line]
    assert len(rows) > 2 + len(predicted_steps.CASES) + len(predicted_steps.WHAT_IFS)
    assert [row for row in rows if row not in text] == []


def test_no_results_are_refused(tmp_path):
    assert (
        "there are no results"
        in call("predicted_steps", f"--results={tmp_path}/none.jsonl", "--rounds=0", status=2).stderr
    )


def test_the_results_have_at_least_twelve_layouts_that_the_profile_is_not_made_of():
    measured = json.loads(RESULTS.read_text().splitlines()[0])["seconds"]
    made_of = [config for each in predicted_steps.make_calibrations() for config in each.configs]
    assert set(predicted_steps.CASES) <= set(measured)
    assert len(predicted_steps.CASES) >= 12
    assert not any(config in made_of for config in predicted_steps.CASES.values())


@pytest.mark.parametrize("config", predicted_steps.CASES.values(), ids=list(predicted_steps.CASES))
def test_every_layout_is_one_that_trains(config):
    config.validate()
