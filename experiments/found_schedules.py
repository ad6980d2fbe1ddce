"""How good the schedules are that a search finds: beside the best named one, and beside a time that none can beat.

    python -m experiments.found_schedules --pipe=2 --pipe=4 --output=found.jsonl

For each number of ranks, chunks, microbatches and each set of costs, caps from the least to GPipe's are searched in
both clocks. The costs are equal ones, and those that the planner's cost model predicts on an A100 for a GPT, for one
with long sequences, whose attention takes most of the time, and for one with a large vocabulary, whose head does. Each
problem is a line of JSON in the file; `--summary` only prints the tables of what the file has.
"""

import itertools
import pathlib
import statistics
import time
from collections.abc import Iterable, Iterator
from typing import Any

from absl import app, flags

from experiments.results import append_result, owned, read_results
from fiddlex.config import Config, MeshConfig, ModelConfig
from fiddlex.hardware.topology import load_topology
from fiddlex.planner.cost_model import CostModel
from fiddlex.schedules.placement import place_layers
from fiddlex.simulate.clock import Costs
from fiddlex.synthesis.anywhere import placements
from fiddlex.synthesis.bounds import lower_bound
from fiddlex.synthesis.problem import CLOCKS, ROUNDING, Judged, Problem
from fiddlex.synthesis.search import EFFORT, find, named

_PIPE = flags.DEFINE_multi_integer("pipe", [2, 4, 8, 16], "ranks", lower_bound=1)
_CHUNKS = flags.DEFINE_multi_integer("chunks", [1, 2], "stages on a rank", lower_bound=1)
_OUTPUT = flags.DEFINE_string(
    "output", None, "JSON Lines file; problems that it has are not searched again", required=True
)
_SUMMARY = flags.DEFINE_bool("summary", False, "only print the tables of the file")

MODELS = {
    "gpt": ModelConfig(hidden_size=2048, num_heads=16, seq_len=2048, vocab_size=51200, dtype="bfloat16"),
    "attention-heavy": ModelConfig(hidden_size=1024, num_heads=16, seq_len=16384, vocab_size=51200, dtype="bfloat16"),
    "head-heavy": ModelConfig(hidden_size=1024, num_heads=16, seq_len=1024, vocab_size=262144, dtype="bfloat16"),
}
COSTS = ("equal", *MODELS)
_QUESTION = ("pipe", "chunks", "m", "costs", "clock", "cap")
_FIELDS = (*_QUESTION, "named", "found", "bound", "origin", "search_s", "bound_s")

Row = dict[str, Any]


def main(argv: list[str]) -> None:
    """Searches, writes rows, and prints the tables."""
    del argv
    path = pathlib.Path(_OUTPUT.value)
    rows = read_results(path, _FIELDS)
    if not _SUMMARY.value:
        with owned(path):
            known = {_key(row) for row in rows}
            for question in questions(_PIPE.value, _CHUNKS.value):
                if _key(question) not in known:
                    rows.append(question | searched(**question))
                    append_result(path, rows[-1])
    print(tables(rows))


def questions(pipes: Iterable[int], all_chunks: Iterable[int]) -> Iterator[Row]:
    """All problems, small ones first."""
    for pipe, chunks, times, costs, clock in itertools.product(pipes, all_chunks, (1, 2, 4), COSTS, CLOCKS):
        m = times * pipe
        caps = {1, max(pipe // 3, 1), max(pipe // 2, 1), pipe, 2 * pipe - 1, m}
        for cap in sorted(cap for cap in caps if cap <= m):
            yield {"pipe": pipe, "chunks": chunks, "m": m, "costs": costs, "clock": clock, "cap": cap}


def searched(pipe: int, chunks: int, m: int, costs: str, clock: str, cap: int) -> Row:
    """The best named schedule, the one found, the bound, and the CPU seconds of search and bound."""
    best: Judged | None = None
    found: Judged | None = None
    origin, bound, search_s, bound_s = "", float("inf"), 0.0, 0.0
    ranks = placements(pipe, chunks)
    for placement in ranks:
        problem = Problem.in_microbatches(placement, m, costs_of(costs, placement), cap, clock)
        for schedule, _ in named(problem):
            judged = problem.judge(schedule)
            best = judged if judged is not None and judged.better_than(best) else best
        start = time.process_time()
        answer = find(problem, effort=EFFORT // len(ranks), with_bound=False)
        searched_s = time.process_time()
        bound = min(bound, lower_bound(problem, answer.judged.time))
        search_s, bound_s = search_s + searched_s - start, bound_s + time.process_time() - searched_s
        if answer.judged.better_than(found):
            found, origin = answer.judged, answer.origin
    assert found is not None
    times = {"search_s": round(search_s, 2), "bound_s": round(bound_s, 2)}
    return {"named": best and best.time, "found": found.time, "bound": bound, "origin": origin, **times}


def costs_of(name: str, placement: tuple[int, ...]) -> Costs:
    """The costs of the stages; seconds, except for equal ones."""
    if name == "equal":
        return Costs()
    pipe, layers = 1 + max(placement), len(placement)
    config = Config(model=MODELS[name], mesh=MeshConfig(pipe=pipe))
    config.model.num_layers = layers
    times = CostModel(config, load_topology("a100_80")).microbatch(
        config.mesh, num_microbatches=config.pipeline.num_microbatches, recompute="none"
    )
    return times.costs(place_layers(placement, layers))


def tables(rows: Iterable[Row]) -> str:
    """A table with a row for each number of ranks, set of costs and clock."""
    groups: dict[tuple[int, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["pipe"], row["costs"], row["clock"]), []).append(row)
    header = (
        "p", "costs", "clock", "problems", "no name keeps the cap", "as fast as the best name", "faster",
        "gain, median and largest", "within 5% of the bound", "above the bound, median and largest",
        "CPU seconds of a search, most", "of a bound, most",
    )  # fmt: skip
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    for (pipe, costs, clock), group in sorted(groups.items(), key=lambda item: (item[0][0], COSTS.index(item[0][1]))):
        named_ones = [row for row in group if row["named"]]
        gains = [1 - row["found"] / row["named"] for row in named_ones]
        assert min(gains, default=0.0) >= -ROUNDING, "a search found something worse than a name"
        faster = [gain for gain in gains if gain > ROUNDING]
        above = [row["found"] / row["bound"] - 1 for row in group]
        cells = (
            *(pipe, costs, clock.replace("_", "-"), len(group), len(group) - len(named_ones)),
            *(len(gains) - len(faster), len(faster)),
            f"{statistics.median(faster):.1%}, {max(faster):.1%}" if faster else "",
            f"{sum(each <= 0.05 for each in above)} of {len(above)}",
            f"{statistics.median(above):.1%}, {max(above):.1%}",
            *(f"{max(row[name] for row in group):.1f}" for name in ("search_s", "bound_s")),
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _key(row: Row) -> tuple[object, ...]:
    return tuple(row[name] for name in _QUESTION)


if __name__ == "__main__":
    app.run(main)
