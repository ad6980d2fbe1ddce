"""Predicts the steps of many layouts from one profile, and holds them against what they take on this machine.

    python experiments/predicted_steps.py --results=docs/studies/steps.jsonl [--rounds=20]

All of it runs in one process: the few steps that tell the profile (`fiddlex.planner.fit`) and the layouts that are
predicted from it take turns, so that what else the machine does falls on both. Each round is a line of the results, and
a study that was stopped goes on where it was. A step takes what the fastest of its turns took. No layout that is
predicted is among those that the profile is made of.
"""

import dataclasses
import json
import os
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

from absl import flags, logging

from fiddlex.config import Config, MeshConfig, ModelConfig, PipelineConfig
from fiddlex.flags import run
from fiddlex.planner.fit import Calibration
from fiddlex.planner.predict import predict
from fiddlex.planner.profile import Profile, ProfiledCostModel

_RESULTS = flags.DEFINE_string("results", None, "JSON Lines file of rounds, read and added to", required=True)
_ROUNDS = flags.DEFINE_integer("rounds", 20, "rounds that there are to be in the results", lower_bound=0)

MICROBATCH_SIZE = 2
DEVICES = (2, 4, 8)  # for which sharing is measured


def make_config(
    name: str, mesh: MeshConfig | None = None, pipeline: PipelineConfig | None = None, **changes: Any
) -> tuple[str, Config]:
    """A layout of the study's model, and its name."""
    mesh, pipeline = mesh or MeshConfig(), pipeline or PipelineConfig(num_microbatches=4)
    model = ModelConfig(num_layers=8, hidden_size=256, num_heads=4, seq_len=128, vocab_size=512)
    config = Config(model=dataclasses.replace(model, **changes), mesh=mesh, pipeline=pipeline)
    config.data.global_batch_size = mesh.data * pipeline.num_microbatches * MICROBATCH_SIZE
    config.train.num_steps = 10_000  # which no pipeline drains for
    return name, config


INTERLEAVED = "interleaved_1f1b"
CASES = dict(
    [
        make_config("one device", pipeline=PipelineConfig(num_microbatches=8)),
        make_config("data=4", MeshConfig(data=4), PipelineConfig(num_microbatches=2)),
        make_config("data=2, tensor=2", MeshConfig(data=2, tensor=2)),
        make_config("pipe=4", MeshConfig(pipe=4), PipelineConfig(num_microbatches=8)),
        make_config("data=2, pipe=2", MeshConfig(data=2, pipe=2)),
        make_config("pipe=2, tensor=2", MeshConfig(pipe=2, tensor=2)),
        make_config("data=2, pipe=2, tensor=2", MeshConfig(2, 2, 2)),
        make_config("pipe=2, interleaved, v=2", MeshConfig(pipe=2), PipelineConfig(INTERLEAVED, 2, 4)),
        make_config("pipe=4, interleaved, v=2", MeshConfig(pipe=4), PipelineConfig(INTERLEAVED, 2, 8)),
        make_config("pipe=4, zb_h1", MeshConfig(pipe=4), PipelineConfig("zb_h1", 1, 8)),
        make_config("pipe=4, gpipe", MeshConfig(pipe=4), PipelineConfig("gpipe", 1, 8)),
        make_config("pipe=2, recompute=full", MeshConfig(pipe=2), PipelineConfig("1f1b", 1, 4, recompute="full")),
        make_config("pipe=2, 2bw", MeshConfig(pipe=2), PipelineConfig("1f1b", 1, 4, semantics="2bw")),
        make_config("pipe=4, 2bw", MeshConfig(pipe=4), PipelineConfig("1f1b", 1, 8, semantics="2bw")),
        make_config("BERT, pipe=2", MeshConfig(pipe=2), family="bert"),
    ]
)


def main(argv: list[str]) -> None:
    """Measures what is missing and prints the table."""
    path = pathlib.Path(_RESULTS.value)
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    calibration = Calibration.of(make_config("")[1], DEVICES)
    missing = _ROUNDS.value - len(lines)
    if missing > 0:
        lines += measure(calibration, missing, path)
    print(table(calibration, lines))


def measure(calibration: Calibration, number: int, path: pathlib.Path) -> list[dict[str, Any]]:
    """So many rounds, each written as it ends."""
    from fiddlex.train.timing import Case, about, rounds

    configs = [*calibration.configs, *CASES.values()]
    cases = [*map(Case, configs), Case(calibration.forward, forward_only=True)]
    path.parent.mkdir(parents=True, exist_ok=True)
    lines: list[dict[str, Any]] = []
    for seconds in rounds(cases):
        line = about() | {"load": os.getloadavg()[0], "seconds": [round(each, 5) for each in seconds]}
        lines.append(line)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        logging.info("Round %d of %d took %.1f s, load %.1f.", len(lines), number, sum(seconds), line["load"])
        if len(lines) == number:
            break
    return lines


def table(calibration: Calibration, lines: Sequence[dict[str, Any]]) -> str:
    """Predicted and measured steps, and the median of the errors."""
    seconds = [min(row) for row in zip(*(line["seconds"] for line in lines), strict=True)]
    number = len(calibration.configs)
    about = {name: lines[-1][name] for name in ("machine", "jax_version", "date")}
    profile = calibration.fit(seconds[:number], seconds[-1], about)
    rows, errors = [], []
    for (name, config), measured in zip(CASES.items(), seconds[number:-1], strict=True):
        predicted = predict(config, ProfiledCostModel(config, profile)).seconds
        errors.append(predicted / measured - 1)
        m, semantics = config.pipeline.num_microbatches, config.pipeline.semantics
        rows.append(f"| {name} | {m} | {semantics} | {predicted:.3f} | {measured:.3f} | {errors[-1]:+.1%} |")
    loads = sorted(line["load"] for line in lines)
    off = sorted(map(abs, errors))
    return "\n".join(
        [
            f"{profile.machine}, jax {profile.jax_version}, {profile.date}; the fastest of {len(lines)} turns; load "
            f"average {loads[0]:.1f} to {loads[-1]:.1f}, median {statistics.median(loads):.1f}",
            describe(profile),
            "",
            "| layout | m | semantics | predicted, s | measured, s | off by |",
            "|---|---:|---|---:|---:|---:|",
            *rows,
            "",
            f"Median error {statistics.median(off):.1%}, largest {off[-1]:.1%}, {len(rows)} layouts.",
        ]
    )


def describe(profile: Profile) -> str:
    """The profile in a line."""
    entry = profile.entries[0]
    sharing = ", ".join(f"{n}: {slower:.2f}" for n, slower in zip(profile.devices, profile.sharing, strict=True))
    ticks = ", ".join(f"{n}: {1e3 * tick:.1f}" for n, tick in zip(profile.devices, profile.tick_s, strict=True))
    return (
        f"profile, ms: layer {1e3 * entry.forward_s:.2f} forward and {1e3 * entry.backward_s:.2f} backward, outside "
        f"{1e3 * entry.edges_s:.2f}; ticks of so many devices {ticks}; sharing {sharing}"
    )


if __name__ == "__main__":
    run(main)
