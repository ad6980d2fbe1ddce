"""Predicts the steps of many layouts from one profile, and compares them with steps measured on this machine.

    python -m experiments.predicted_steps --results=docs/studies/steps.jsonl [--rounds=20]

All steps run in one process. The few steps from which the profile is fitted (`fiddlex.planner.fit`) and the layouts
that are predicted take turns, so that other load on the machine affects both. Each round adds a line to the results,
and a stopped study continues where it stopped. The time of a step is that of its fastest turn. No predicted layout is
among those from which the profile is fitted. A second table changes one thing of a layout at a time
(`fiddlex.tools.what_if`) and compares the predicted ratio of the two steps with the measured ratio.
"""

import os
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from experiments.results import append_result, read_results
from experiments.step_cases import CASES, WHAT_IFS, make_calibrations
from fiddlex.config import Config
from fiddlex.errors import ConfigError
from fiddlex.planner.fit import Calibration
from fiddlex.planner.predict import predict
from fiddlex.planner.profile import Profile, ProfiledCostModel
from fiddlex.terminal.command_line import run
from fiddlex.tools.what_if import Scenario, apply, what_if

_RESULTS = flags.DEFINE_string("results", None, "JSON Lines file of rounds, read and added to", required=True)
_ROUNDS = flags.DEFINE_integer("rounds", 20, "rounds that there are to be in the results", lower_bound=0)


def main(argv: list[str]) -> None:
    """Measures the missing rounds and prints the tables."""
    path, number = pathlib.Path(_RESULTS.value), _ROUNDS.value
    calibrations = make_calibrations()
    lines = read_results(path, ["machine", "jax_version", "date", "load", "seconds"])
    check(path, lines, calibrations)
    if number > len(lines):
        lines += measure(calibrations, number - len(lines), path, {line["machine"] for line in lines})
    if not lines:
        raise ConfigError(f"there are no results in {path}: ask for --rounds of at least 1.")
    seconds = {name: min(line["seconds"][name] for line in lines) for name in lines[0]["seconds"]}
    about = {name: lines[-1][name] for name in ("machine", "jax_version", "date")}
    profile, *more = (
        each.fit([seconds[label(c)] for c in each.configs], seconds[label(each.forward, forward=True)], about)
        for each in calibrations
    )
    for other in more:
        profile = profile.with_entry(other.entries[0])
    print(caption(profile, lines), table(profile, seconds), ratios(profile, seconds), sep="\n\n")


def check(path: pathlib.Path, lines: Sequence[Mapping[str, Any]], calibrations: Sequence[Calibration]) -> None:
    """Raises ConfigError when rounds are of several machines, or of other cases than the present ones."""
    machines = sorted({line["machine"] for line in lines})
    if len(machines) > 1:
        raise ConfigError(f"{path} has rounds of {' and of '.join(machines)}. Keep those of each in a file of its own.")
    missing = [name for name in cases(calibrations) for line in lines if name not in line["seconds"]]
    if missing:
        raise ConfigError(f"{path} has rounds without {missing[0]!r}: of other cases. Measure anew into another file.")


def label(config: Config, *, forward: bool = False) -> str:
    """The name of a step from which the profile is fitted."""
    model, mesh, pipeline = config.model, config.mesh, config.pipeline
    return (
        f"profile: {model.num_layers} layers, data={mesh.data}, pipe={mesh.pipe}, m={pipeline.num_microbatches}, "
        f"recompute={pipeline.recompute}{', forward alone' * forward}"
    )


def cases(calibrations: Sequence[Calibration]) -> dict[str, Config]:
    """All measured configs, by name."""
    found = {label(config): config for each in calibrations for config in each.configs}
    found |= {label(each.forward, forward=True): each.forward for each in calibrations}
    found |= CASES
    return found | {f"{name}: {change}": apply(Scenario(CASES[name]), change).config for name, change in WHAT_IFS}


def measure(
    calibrations: Sequence[Calibration], number: int, path: pathlib.Path, machines: set[str]
) -> list[dict[str, Any]]:
    """Measures `number` rounds and writes each to `path` as it ends.

    Raises:
      ConfigError: when earlier rounds were measured on other machines (`machines`).
    """
    from fiddlex.cluster.mesh import request_devices
    from fiddlex.train.timing import TimedCase, about, rounds

    forward = {label(each.forward, forward=True) for each in calibrations}
    steps = {name: TimedCase(config, forward_only=name in forward) for name, config in cases(calibrations).items()}
    request_devices(max(case.config.mesh.num_devices for case in steps.values()))
    if machines - {about()["machine"]}:
        raise ConfigError(f"{path} has rounds of {machines.pop()}; this is {about()['machine']}. Name another file.")
    lines: list[dict[str, Any]] = []
    for seconds in rounds(list(steps.values())):
        by_name = {name: round(each, 5) for name, each in zip(steps, seconds, strict=True)}
        lines.append(about() | {"load": os.getloadavg()[0], "seconds": by_name})
        append_result(path, lines[-1])
        if len(lines) == number:
            break
    return lines


def predicted(config: Config, profile: Profile) -> float:
    """The predicted seconds of a step."""
    return predict(config, ProfiledCostModel(config, profile)).seconds


def table(profile: Profile, seconds: Mapping[str, float]) -> str:
    """Predicted and measured steps, and the median of the errors."""
    rows = ["| layout | m | predicted, s | measured, s | off by |", "|---|---:|---:|---:|---:|"]
    errors = []
    for name, config in CASES.items():
        guess, m = predicted(config, profile), config.pipeline.num_microbatches
        errors.append(guess / seconds[name] - 1)
        rows.append(f"| {name} | {m} | {guess:.3f} | {seconds[name]:.3f} | {errors[-1]:+.1%} |")
    return "\n".join([*rows, "", summary(errors)])


def ratios(profile: Profile, seconds: Mapping[str, float]) -> str:
    """The predicted and measured effect of each change on a step, as ratios."""
    rows = ["| layout | change | predicted | measured | off by |", "|---|---|---:|---:|---:|"]
    errors = []
    for name, change in WHAT_IFS:
        (answer,) = what_if(Scenario(CASES[name], profile=profile), [change])
        real = seconds[f"{name}: {change}"] / seconds[name]
        errors.append(answer.ratio / real - 1)
        rows.append(f"| {name} | `{change}` | {answer.ratio:.3f} | {real:.3f} | {errors[-1]:+.1%} |")
    return "\n".join([*rows, "", summary(errors)])


def summary(errors: Sequence[float]) -> str:
    """The median and the largest of the errors, in one line."""
    off = [abs(error) for error in errors]
    return f"Median error {statistics.median(off):.1%}, largest {max(off):.1%}, of {len(off)}."


def caption(profile: Profile, lines: Sequence[Mapping[str, Any]]) -> str:
    """Where and how the steps were measured, and the profile."""
    loads = [line["load"] for line in lines]
    sharing = ", ".join(f"{n}: {slower:.2f}" for n, slower in zip(profile.devices, profile.sharing, strict=True))
    ticks = ", ".join(f"{n}: {1e3 * tick:.1f}" for n, tick in zip(profile.devices, profile.tick_s, strict=True))
    layers = "; ".join(
        f"recompute={each.recompute} {1e3 * each.forward_s:.2f}, {1e3 * each.backward_s:.2f}, {1e3 * each.edges_s:.2f}"
        for each in profile.entries
    )
    return (
        f"{profile.machine}, jax {profile.jax_version}, {profile.date}; the fastest of {len(lines)} turns; load "
        f"average {min(loads):.1f} to {max(loads):.1f}, half above {statistics.median(loads):.1f}. Profile, ms of a "
        f"layer forward and backward, and outside: {layers}; tick by devices {ticks}; sharing by devices {sharing}."
    )


if __name__ == "__main__":
    run(main)
