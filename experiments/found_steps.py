"""Measures steps under found schedules and balanced layers beside named schedules, on this machine.

    python -m experiments.found_steps --results=FILE.jsonl [--rounds=30]

A GPT of seven layers with a large vocabulary runs on a pipe of two ranks, so that layers do not divide by stages and
the head takes a large part of the work. All steps take turns in one process. Each round adds a line to the results, and
the table has the median of each step, and of its ratios to 1F1B round by round. `auto` and `balanced` decide by numbers
of operations, as they do for CPU devices, or by the profile of the machine in FILE.profile.json, which is measured
first where it is not there.
"""

import os
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

from absl import flags

from experiments.results import append_result, read_results
from fiddlex.config import Config, DataConfig, MeshConfig, ModelConfig, OptimizerConfig, PipelineConfig, TrainConfig
from fiddlex.planner.fit import Calibration
from fiddlex.planner.profile import Profile, load_profile, save_profile
from fiddlex.planner.settle import settle
from fiddlex.terminal.command_line import run

_RESULTS = flags.DEFINE_string("results", None, "JSON Lines file of rounds, read and added to", required=True)
_ROUNDS = flags.DEFINE_integer("rounds", 30, "rounds that there are to be in the results", lower_bound=1)

# Schedule, chunks, layers of the stages, and whether the costs are those of the profile.
STEPS: dict[str, tuple[str, int, str, bool]] = {
    "1f1b, even": ("1f1b", 1, "", False),
    "1f1b, balanced": ("1f1b", 1, "balanced", False),
    "zb_h1, even": ("zb_h1", 1, "", False),
    "zb_h1, balanced": ("zb_h1", 1, "balanced", False),
    "interleaved_1f1b, even": ("interleaved_1f1b", 2, "", False),
    "zb_v, even": ("zb_v", 2, "", False),
    "auto, one chunk, balanced": ("auto", 1, "balanced", False),
    "auto, two chunks, balanced": ("auto", 2, "balanced", False),
    "auto, one chunk, balanced, by the profile": ("auto", 1, "balanced", True),
    "auto, two chunks, balanced, by the profile": ("auto", 2, "balanced", True),
}
REFERENCE = "1f1b, even"


def main(argv: list[str]) -> None:
    """Measures the missing rounds and prints the table."""
    path = pathlib.Path(_RESULTS.value)
    lines = read_results(path, ["machine", "jax_version", "date", "load", "seconds"])
    if len(lines) < _ROUNDS.value:
        lines += measure(_ROUNDS.value - len(lines), path)
    print(table(lines))


def make_config(schedule: str, chunks: int, layers_per_stage: str, profile: Profile | None = None) -> Config:
    """A config of the study, settled by a profile if there is one."""
    config = Config(
        model=ModelConfig(num_layers=7, hidden_size=128, num_heads=4, vocab_size=8192, seq_len=128),
        mesh=MeshConfig(pipe=2),
        pipeline=PipelineConfig(schedule, chunks, num_microbatches=4, layers_per_stage=layers_per_stage),
        optimizer=OptimizerConfig(name="adamw", learning_rate=1e-3),
        data=DataConfig(source="stdlib", global_batch_size=16),
        train=TrainConfig(num_steps=1000),
    ).validate()
    return settle(config, profile=profile) if profile else config


def profile_in(path: pathlib.Path) -> Profile:
    """The profile of this machine in a file, which is measured and written if it is not there."""
    if path.exists():
        return load_profile(path)
    from fiddlex.train.timing import measured_profile

    alone = make_config(REFERENCE.split(",")[0], 1, "")
    alone.mesh.pipe = 1
    profile = measured_profile(Calibration.of(alone.validate(), [2]), limit_s=60, min_rounds=5)
    save_profile(profile, path)
    return profile


def measure(number: int, path: pathlib.Path) -> list[dict[str, Any]]:
    """Measures so many rounds and writes each as it ends."""
    from fiddlex.cluster.mesh import request_devices
    from fiddlex.train.timing import TimedCase, about, rounds

    request_devices(2)
    profile = profile_in(path.with_suffix(".profile.json"))
    configs = [make_config(*fields[:3], profile if fields[3] else None) for fields in STEPS.values()]
    lines: list[dict[str, Any]] = []
    for seconds in rounds(list(map(TimedCase, configs))):
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
