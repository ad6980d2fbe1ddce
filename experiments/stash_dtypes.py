"""Compares training with stashes of different types: losses, errors of gradients, and what encoding costs.

    python -m experiments.stash_dtypes --results=docs/studies/stash_dtypes.jsonl [--seeds=3 --steps=2000 …]
    python -m experiments.stash_dtypes --results=docs/studies/stash_dtypes.jsonl --finished

The runs train byte-level GPTs on the source of Python's standard library, on one CPU device in float32. All runs of a
seed have equal data, steps and initial weights. `same` runs a second time with more microbatches, which changes
only the order of sums, to show how far chance alone moves a loss. `--topology` names one TPU, for which the two passes
of a layer of GPT-2 medium are compiled. Each finished part adds a line to the results, so that a stopped study
continues where it stopped; `--finished` prints the tables of what is there and computes nothing.
"""

import dataclasses
import datetime
import functools
import itertools
import logging
import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags

from experiments.quality_results import last_loss
from experiments.results import append_result, read_results
from experiments.stash_runs import KINDS, VARIANTS, cases, gradient_errors, layer_costs, step_seconds, train
from fiddlex.config.command_line import run
from fiddlex.config.stash import STASH_DTYPES

logger = logging.getLogger("fiddlex.stash_dtypes")

LOSSY = STASH_DTYPES[1:]
LAYER, EXAMPLES = "configs/gpt2_medium.py", 4  # whose passes are compiled, and the examples of its microbatch

_RESULTS = flags.DEFINE_string("results", None, "JSON Lines file of finished parts, read and added to", required=True)
_HIDDEN = flags.DEFINE_multi_integer("hidden", [64, 128], "hidden sizes of the models; 64, 128 or 256")
_SEEDS = flags.DEFINE_integer("seeds", 3, "seeds for each model and type", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 2000, "steps of a run", lower_bound=10)
_AFTER = flags.DEFINE_multi_integer("after", [0, 300], "exact steps before a gradient is compared", lower_bound=0)
_TOPOLOGIES = flags.DEFINE_multi_string("topology", [], "TPU to compile for, as tpu:v5e:1x1")
_FINISHED = flags.DEFINE_bool("finished", False, "print the tables of what is finished, and compute nothing")

Results = list[dict[str, Any]]
Part = tuple[dict[str, Any], Callable[[], Any]]  # what identifies a part, and what computes its result


def main(argv: list[str]) -> None:
    """Computes the missing parts and prints the tables."""
    path = pathlib.Path(_RESULTS.value)
    results = read_results(path, ["part"])
    for key, compute in [] if _FINISHED.value else parts():
        if not any(key.items() <= result.items() for result in results):
            results.append(key | {"found": compute()} | {"date": str(datetime.date.today())})
            logger.info("finished %s", key)
            append_result(path, results[-1])
    print("\n\n".join([loss_table(results), gradient_table(results), cost_table(results)]))


def parts() -> list[Part]:
    """All parts that the flags ask for, those that take longest last."""
    found: list[Part] = []
    for topology, stash_dtype in itertools.product(_TOPOLOGIES.value, STASH_DTYPES):
        compute = functools.partial(layer_costs, LAYER, topology, stash_dtype, EXAMPLES)
        found.append(({"part": "layer", "topology": topology, "stash_dtype": stash_dtype}, compute))
    for hidden in _HIDDEN.value:
        found.append(({"part": "step", "hidden": hidden}, functools.partial(step_seconds, hidden, STASH_DTYPES)))
        for after, stash_dtype in itertools.product(_AFTER.value, LOSSY):
            compute = functools.partial(gradient_errors, hidden, stash_dtype, after)
            key = {"part": "gradient", "hidden": hidden, "after": after, "stash_dtype": stash_dtype}
            found.append((key, compute))
    for case in cases(_HIDDEN.value, _SEEDS.value, _STEPS.value):
        found.append(({"part": "training", **dataclasses.asdict(case)}, functools.partial(train, case)))
    return found


def loss_table(results: Results) -> str:
    """Held-out losses by seed, their mean, and its difference from that of `same` over the seeds that both have."""
    losses: dict[tuple[Any, ...], dict[int, float]] = {}
    for result in _of("training", results):
        key = result["hidden"], result["steps"], result["stash_dtype"], result["microbatches"]
        losses.setdefault(key, {})[result["seed"]] = last_loss(result["found"])
    lines = [
        "| hidden | steps | stash | held-out loss by seed | mean | against `same` (seeds) |",
        "|---|---|---|---|---|---|",
    ]
    for hidden, steps in sorted({key[:2] for key in losses}):
        base = losses.get((hidden, steps, *VARIANTS[0]), {})
        for stash_dtype, microbatches in VARIANTS:
            found = losses.get((hidden, steps, stash_dtype, microbatches), {})
            name = stash_dtype if microbatches == VARIANTS[0][1] else f"{stash_dtype}, {microbatches} microbatches"
            common = found.keys() & base.keys()
            if found:
                each = ", ".join(f"{found[seed]:.4f}" for seed in sorted(found))
                gap = sum(found[s] for s in common) / sum(base[s] for s in common) - 1 if common else float("nan")
                mean = statistics.fmean(found.values())
                lines.append(
                    f"| {hidden} | {steps} | {name} | {each} | {mean:.4f} | {gap:+.2%} ({len(common)} seeds) |"
                )
    return "\n".join(lines)


def gradient_table(results: Results) -> str:
    """The error of the gradient by what is encoded, a column for each model, number of steps and type."""
    columns = list(_of("gradient", results))
    head = [f"{each['hidden']}, {each['after']} steps, {each['stash_dtype']}" for each in columns]
    lines = [f"| encoded | {' | '.join(head)} |", f"|---|{'---:|' * len(head)}"]
    for kind in ("all", *KINDS):
        errors = (f"{each['found'][kind]:.2%}" for each in columns)
        lines.append(f"| {kind} | {' | '.join(errors)} |")
    return "\n".join(lines)


def cost_table(results: Results) -> str:
    """What a layer's two passes, and a step on this machine, take beside those with `same`."""
    lines = ["| | float8_e4m3fn | int8 |", "|---|---:|---:|"]
    layers = list(_of("layer", results))
    for topology in dict.fromkeys(each["topology"] for each in layers):
        of = {each["stash_dtype"]: each for each in layers if each["topology"] == topology}
        for what in ("flops", "bytes"):
            lines.append(f"| {topology}, {what} | {_ratios({name: of[name]['found'][what] for name in of})} |")
    for each in _of("step", results):
        lines.append(f"| CPU, hidden {each['hidden']}, seconds of a step | {_ratios(each['found'])} |")
    return "\n".join(lines)


def _ratios(values: dict[str, float]) -> str:
    same = values[STASH_DTYPES[0]]
    return " | ".join(f"{values[name] / same:.3f}" if name in values else "" for name in LOSSY)


def _of(part: str, results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for each in results if each["part"] == part]


if __name__ == "__main__":
    run(main)
