"""Compiles train steps for two TPU slices or GPU hosts and prints what crosses the slow link, as a Markdown table.

    python -m experiments.slow_links --results=docs/studies/slow_links.jsonl

No step is run, and no TPU or GPU is needed (extras aot and aot-gpu). A small GPT and one of 1.7 billion parameters are
compiled with `data` across the slow link and with `pipe` across it, the latter also interleaved. `fiddlex compile`
compiles each case in its own process. Each case adds a line to the results, and a case that the file has is not
compiled again. Beside XLA's bytes the table has the planner's, which leave out everything but gradients, weights,
hops, and the sums of embedding and head.
"""

import pathlib

from absl import flags

from experiments.results import append_result, read_results
from experiments.slow_link_cases import SlowCase, cases, compiled, table
from fiddlex.terminal.command_line import run

_RESULTS = flags.DEFINE_string("results", None, "JSON Lines file of compiled cases, read and added to", required=True)


def main(argv: list[str]) -> None:
    """Compiles the cases that the results do not have, and prints the table."""
    path = pathlib.Path(_RESULTS.value)
    results = {SlowCase(*each["case"]): each for each in read_results(path, ("case", "crossing"))}
    for case in cases():
        if case not in results:
            results[case] = compiled(case)
            append_result(path, results[case])
    print(table(results))


if __name__ == "__main__":
    run(main)
