"""Measures steps under found schedules and balanced layers beside named schedules, on this machine.

    python -m experiments.found_steps --results=FILE.jsonl [--rounds=30]

A GPT of seven layers with a large vocabulary runs on a pipe of two ranks, so that layers do not divide by stages and
the head takes a large part of the work. All steps take turns in one process. Each round adds a line to the results, and
the table has the median of each step, and of its ratios to 1F1B round by round.
"""

import os
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

from absl import flags

from experiments.results import append_result, read_results
from fiddlex.config import Config, DataConfig, MeshConfig, ModelConfig, OptimizerConfig, PipelineConfig, TrainConfig
from fiddlex.config.command_line import run

_RESULTS = flags.DEFINE_string("results", None, "JSON Lines file of rounds, read and added to", required=True)
_ROUNDS = flags.DEFINE_integer("rounds", 30, "rounds that there are to be in the results", lower_bound=1)

# Schedule, chunks, layers of the stages.
STEPS = {
    "1f1b, even": ("1f1b", 1, ""),
    "1f1b, balanced": ("1f1b", 1, "balanced"),
    "zb_h1, even": ("zb_h1", 1, ""),
    "zb_h1, balanced": ("zb_h1", 1, "balanced"),
    "interleaved_1f1b, even": ("interleaved_1f1b", 2, ""),
    "zb_v, even": ("zb_v", 2, ""),
    "auto, one chunk, balanced": ("auto", 1, "balanced"),
    "auto, two chunks, balanced": ("auto", 2, "balanced"),
}
REFERENCE = "1f1b, even"


def main(argv: list[str]) -> None:
    """Measures the missing rounds and prints the table."""
    path = pathlib.Path(_RESULTS.value)
    lines = read_results(path, ["machine", "jax_version", "date", "load", "seconds"])
    if len(lines) < _ROUNDS.value:
        lines += measure(_ROUNDS.value - len(lines), path)
    print(table(lines))


def make_config(schedule: str, chunks: int, layers_per_stage: str) -> Config:
    """A config of the study."""
    return Config(
        model=ModelConfig(num_layers=7, hidden_size=128, num_heads=4, vocab_size=8192, seq_len=128),
        mesh=MeshConfig(pipe=2),
        pipeline=PipelineConfig(schedule, chunks, num_microbatches=4, layers_per_stage=layers_per_stage),
        optimizer=OptimizerConfig(name="adamw", learning_rate=1e-3),
        data=DataConfig(source="stdlib", global_batch_size=16),
        train=TrainConfig(num_steps=1000),
    ).validate()


def measure(number: int, path: pathlib.Path) -> list[dict[str, Any]]:
    """Measures so many rounds and writes each as it ends."""
    from fiddlex.cluster.mesh import request_devices
    from fiddlex.train.timing import TimedCase, about, rounds

    request_devices(2)
    lines: list[dict[str, Any]] = []
    for seconds in rounds([TimedCase(make_config(*fields)) for fields in STEPS.values()]):
        by_name = {name: round(each, 5) for name, each in zip(STEPS, seconds, strict=True)}
        lines.append(about() | {"load": os.getloadavg()[0], "seconds": by_name})
        append_result(path, lines[-1])
        if len(lines) == number:
            break
    return lines


def table(lines: Sequence[dict[str, Any]]) -> str:
    """The steps, and their ratios to the reference."""
    loads = [line["load"] for line in lines]
    rows = [
        f"{lines[-1]['machine']}, jax {lines[-1]['jax_version']}, {lines[-1]['date']}, {len(lines)} rounds, load "
        f"{min(loads):.1f} to {max(loads):.1f}\n",
        "| schedule and layers | median, ms | fastest, ms | of 1F1B's time, median of rounds |",
        "|---|---:|---:|---:|",
    ]
    for name in STEPS:
        seconds = [line["seconds"][name] for line in lines]
        ratios = [line["seconds"][name] / line["seconds"][REFERENCE] for line in lines]
        milliseconds = f"{1e3 * statistics.median(seconds):.1f} | {1e3 * min(seconds):.1f}"
        rows.append(f"| {name} | {milliseconds} | {statistics.median(ratios):.3f} |")
    return "\n".join(rows)


if __name__ == "__main__":
    run(main)
