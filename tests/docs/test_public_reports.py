"""docs/studies/public_reports.md: each report has a verdict and a test that exists."""

import re

import pytest

from tests.programs import ROOT

LINES = (ROOT / "docs" / "studies" / "public_reports.md").read_text(encoding="utf-8").splitlines()
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in LINES if line.startswith("| [")]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_the_row_names_a_report_a_verdict_and_a_test(row: list[str]) -> None:
    reports, _, verdict, test = row
    assert re.match(r"\[.+ #\d+\]\(https://github\.com/[^)]+/(issues|pull)/\d+\)", reports)
    assert verdict.startswith(("mended", "holds"))
    assert (ROOT / test.strip("`")).is_file()
