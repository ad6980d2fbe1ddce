"""Compiles the configs' models for the smallest TPU slices that hold them and prints a markdown table.

    python -m experiments.benchmarks.compile_models [--results=docs/studies/compile.jsonl --limit_s=600]

`experiments/compile.py` compiles each model in its own process and prints JSON, which becomes a line of the results;
cases that are already in the results are not compiled again. The slices were chosen by hand. Every model has its
published batch.
"""

import pathlib
import sys
from typing import Any

from absl import flags

from experiments.benchmarks.compile_cases import CASES, measure
from experiments.results import append_result, read_results
from fiddlex.terminal.command_line import run

_RESULTS = flags.DEFINE_string("results", "docs/studies/compile.jsonl", "where results are kept, a line for each")
_LIMIT_S = flags.DEFINE_integer("limit_s", 600, "seconds after which a model is given up", lower_bound=1)

COLUMNS = {
    "config": "---",
    "billion parameters": "---:",
    "slice": "---",
    "data × pipe × tensor": "---",
    "schedule": "---",
    "peak, GiB": "---:",
    "there, GiB": "---:",
    "fits": "---",
    "trace, s": "---:",
    "compile, s": "---:",
    "collectives, overlapped / all": "---:",
    "of their bytes": "---:",
}


def main(argv: list[str]) -> None:
    """Compiles the missing cases and prints the table."""
    path = pathlib.Path(_RESULTS.value)
    lines = read_results(path, ["config", "topology"])
    known = {(record["config"], record["topology"]): record for record in lines}
    for case in CASES:
        if (case.config, case.topology) not in known:
            print(f"{case.config} for {case.topology} …", file=sys.stderr)
            record = known[case.config, case.topology] = measure(case, _LIMIT_S.value)
            append_result(path, record)
    print(f"| {' | '.join(COLUMNS)} |\n|{'|'.join(COLUMNS.values())}|")
    for case in CASES:
        print(row(known[case.config, case.topology]), flush=True)


def row(record: dict[str, Any]) -> str:
    """A line of the table."""
    name, slice_name = f"`{record['config']}`", record["topology"].removeprefix("tpu:")
    if "limit_s" in record:
        return f"| {name} | | {slice_name} |{' |' * 6} over {record['limit_s']} | | |"
    schedule = f"m={record['num_microbatches']}"
    if record["mesh"]["pipe"] > 1:
        schedule = f"{record['schedule']}, {schedule}"
    exchanges = record["collectives"] or []
    hidden = [each for each in exchanges if each["overlapped"]]
    volume, of_hidden = (sum(each["bytes"] * (each["count"] or 0) for each in some) for some in (exchanges, hidden))
    cells = [
        name,
        f"{record['num_parameters'] / 1e9:.4g}",
        slice_name,
        " × ".join(map(str, record["mesh"].values())),
        schedule,
        *(f"{record[size] / 2**30:.1f}" if record[size] else "" for size in ("needed_bytes", "memory_limit_bytes")),
        "yes" if record["fits"] else "no",
        f"{record['trace_s']:.1f}",
        f"{record['compile_s']:.1f}",
        f"{len(hidden)} / {len(exchanges)}" if exchanges else "",
        f"{of_hidden / volume:.0%}" if volume else "",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    run(main)
