"""How much of tensor parallelism's exchange has no work beside it, in the steps compiled for SC'21's models.

    python -m experiments.benchmarks.hidden_exchange [--chip=h100 --only=145.6b]

Compiles the models of SC'21 (Narayanan et al., table 1) that have tensor ranks in three ways: as they are, with
sequence parallelism, and with collective matmul as well (`mesh.collective_matmul`). For H100s they have the paper's
meshes on servers of eight GPUs; for TPU v5p they are on slices that hold them. Cases that are already in the results
are not compiled again. GB are those that a device sends over `tensor` in a step: around a ring of n devices an
all-gather or a reduce-scatter sends (n − 1)/n of the whole array, an all-reduce twice that, and a permute all that it
moves. Compiling for H100s takes the extra `aot-gpu`.
"""

import contextlib
import pathlib
import sys
from typing import Any

from absl import flags

from configs.gpt3 import ROWS
from experiments.benchmarks.compile_cases import CASES, CompileCase, measure
from experiments.results import append_result, owned, read_results
from fiddlex.terminal.command_line import run

_RESULTS = flags.DEFINE_string("results", "docs/studies/hidden_exchange.jsonl", "where results are kept")
_LIMIT_S = flags.DEFINE_integer("limit_s", 900, "seconds after which a compilation is given up", lower_bound=1)
_ONLY = flags.DEFINE_string("only", "", "compile only models whose name contains this")
_CHIP = flags.DEFINE_enum("chip", "v5p", ["v5p", "h100"], "the chip to compile for")

WAYS: dict[str, dict[str, Any]] = {
    "collective matmul": {"mesh.sequence_parallel": True, "mesh.collective_matmul": True},
    "sequence parallel": {"mesh.sequence_parallel": True},
    "plain": {},
}
TWO_RANKS = {"mesh.data": 2, "mesh.tensor": 2, "pipeline.num_microbatches": 256}
ON_TPUS = [
    CompileCase("gpt3.py:3.6b", "tpu:v5p:2x2x1", TWO_RANKS),
    *(case for case in CASES if case.config.startswith("gpt3.py") and "v5p" in case.topology),
]
ON_GPUS = [
    CompileCase(f"gpt3.py:{name}", f"gpu:h100:{row.gpus // 8}x8", {})
    for name, row in ROWS.items()
    if row.tensor > 1 and name != "174.6b"  # this one is in table 2
]
KEPT = ("num_devices", "mesh", "num_microbatches", "peak_bytes", "fits", "compile_s", "jax_version")


def main(argv: list[str]) -> None:
    """Compiles what is missing and prints the table."""
    path = pathlib.Path(_RESULTS.value)
    keys = ("config", "topology", "way")
    known = {tuple(record[key] for key in keys): record for record in read_results(path, keys)}
    cases = ON_TPUS if _CHIP.value == "v5p" else ON_GPUS
    missing = [
        (case, way)
        for way in WAYS
        for case in cases
        if (case.config, case.topology, way) not in known and _ONLY.value in case.config
    ]
    with owned(path) if missing else contextlib.nullcontext():
        for case, way in missing:
            print(f"{case.config} for {case.topology}, {way} …", file=sys.stderr)
            found = compiled(case._replace(overrides=case.overrides | WAYS[way]), way)
            known[case.config, case.topology, way] = found
            append_result(path, found)
    print("| model | devices | data × pipe × tensor | | GB over tensor | without work beside | peak, GiB |")
    print("|---|---|---|---|---:|---:|---:|")
    for case in cases:
        for way in reversed(WAYS):
            if record := known.get((case.config, case.topology, way)):
                print(row(record))


def compiled(case: CompileCase, way: str) -> dict[str, Any]:
    """What `compile.py` reports of a case, with the GB over `tensor` in place of each collective."""
    facts = measure(case, _LIMIT_S.value)
    asked = {"config": case.config, "topology": case.topology, "way": way, "overrides": case.overrides}
    if "limit_s" in facts:
        return {**asked, "limit_s": facts["limit_s"]}
    over = [each for each in facts["collectives"] if each["axis"] == "tensor"]
    exposed = [each for each in over if not each["overlapped"]]
    sizes = {"gb": sum(map(gb, over)), "exposed_gb": sum(map(gb, exposed))}
    return {**asked, **{name: facts[name] for name in KEPT}, **sizes}


def gb(collective: dict[str, Any]) -> float:
    """GB that a device sends for a collective in a step."""
    size, devices = collective["bytes"] * (collective["count"] or 0) / 1e9, collective["group_size"]
    if collective["kind"] == "collective-permute":
        return size
    return size * (devices - 1) / devices * (2 if collective["kind"] == "all-reduce" else 1)


def row(record: dict[str, Any]) -> str:
    """A line of the table."""
    place = record["topology"].partition(":")[2]
    name, way = record["config"].removeprefix("gpt3.py:"), record["way"]
    if "limit_s" in record:
        return f"| {name} | {place} | | {way} | over {record['limit_s']} s | | |"
    mesh, exposed, peak = record["mesh"].values(), record["exposed_gb"], record["peak_bytes"] / 2**30
    share = f"{exposed:,.0f} ({exposed / record['gb']:.0%})"
    return f"| {name} | {place} | {' × '.join(map(str, mesh))} | {way} | {record['gb']:,.0f} | {share} | {peak:.1f} |"


if __name__ == "__main__":
    run(main)
