"""The study of encoded stashes: its tables are those of its results, and its runs are those that it describes."""

import pathlib

from experiments.results import read_results
from experiments.stash_results import cost_table, gradient_table, loss_table
from experiments.stash_runs import VARIANTS, cases, make_config

DOCS = pathlib.Path(__file__).parents[1] / "docs"


def test_the_tables_of_the_docs_are_of_the_results() -> None:
    results = read_results(DOCS / "studies/stash_dtypes.jsonl", ["part", "found"])
    page = (DOCS / "memory.md").read_text(encoding="utf-8")
    for table in (loss_table, gradient_table, cost_table):
        assert table(results) in page


def test_runs_of_a_seed_differ_only_in_the_stash_and_the_microbatches() -> None:
    (same, *others) = [make_config(case).validate() for case in cases([64], seeds=1, steps=20)]
    assert len(others) == len(VARIANTS) - 1
    for other in others:
        other.pipeline.stash_dtype, other.pipeline.num_microbatches = "same", same.pipeline.num_microbatches
        assert other == same
