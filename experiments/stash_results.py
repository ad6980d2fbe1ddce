"""Tables of the results of experiments.stash_dtypes."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.quality_results import last_loss
from experiments.stash_runs import KINDS, VARIANTS
from fiddlex.config.values.stash import STASH_DTYPES

Results = list[dict[str, Any]]  # of parts of the study: what identifies one, and what was `found`
LOSSY = STASH_DTYPES[1:]


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


def _ratios(values: Mapping[str, float]) -> str:
    same = values[STASH_DTYPES[0]]
    return " | ".join(f"{values[name] / same:.3f}" if name in values else "" for name in LOSSY)


def _of(part: str, results: Sequence[dict[str, Any]]) -> Results:
    return [each for each in results if each["part"] == part]
