"""Compares systems: the losses of their first steps, then their times in turns."""

import contextlib
import dataclasses
import functools
import logging
import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from experiments.benchmarks.known_systems import Asked
from experiments.benchmarks.systems import Times, measured, started, turn
from fiddlex.errors import FiddlexError
from third_party.protocol import Job

logger = logging.getLogger("fiddlex.against")

# Largest difference of two losses, relative to the one that is expected, by the dtype of arithmetic.
TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-3}


class Expected(NamedTuple):
    """What the losses of the first steps are compared with.

    Attributes:
      name: whose losses they are.
      losses: those of the first steps.
    """

    name: str
    losses: list[float]


@dataclasses.dataclass(frozen=True)
class Result:
    """What a system did.

    Attributes:
      name: the system, as the user named it.
      versions: what computed its steps.
      losses: those of the first steps.
      differs: why it trains another model; empty when it trains the same.
      times: seconds of a step and its CPU seconds, the mean of each turn.
      speedups: how many times as fast the first system was, in each round.
      peak_bytes: the most bytes of the device's memory that it has had; None where the device does not count them.
    """

    name: str
    versions: str
    losses: list[float]
    differs: str
    times: list[Times]
    speedups: list[float]
    peak_bytes: int | None = None

    def to_record(self, tokens_per_step: int) -> dict[str, Any]:
        """The result as JSON has it, with medians and quartiles."""
        step_s, cpu_s = (list(values) for values in zip(*self.times, strict=True))
        median = statistics.median(step_s)
        return dataclasses.asdict(self) | {
            "step_time_s": median,
            "quartiles_s": quartiles(step_s),
            "cpu_s": statistics.median(cpu_s),
            "tokens_per_second": tokens_per_step / median,
            "speedup": statistics.median(self.speedups),
            "speedup_quartiles": quartiles(self.speedups),
        }


def first_losses(asked: Asked, job: Job) -> Expected:
    """Lets a system train the first steps of a job and ends it; other systems are compared with its losses.

    Raises:
      FiddlexError: when its driver ends or answers something else.
    """
    with started(asked.name, asked.command, dataclasses.replace(job, **asked.own)) as system:
        return Expected(asked.name, system.answer()["losses"])


def compare(
    asked: Sequence[Asked],
    job: Job,
    *,
    rounds: int,
    steps: int,
    tolerance: float,
    expected: Expected | None = None,
) -> list[Result]:
    """Starts all systems, compares their losses and lets them take turns.

    Args:
      asked: the systems, of which the others' times are compared with those of the first.
      job: the job of all systems.
      rounds: turns that each system gets, at least two; one more is not counted.
      steps: steps in a turn.
      tolerance: largest difference of two losses, relative to those that are expected.
      expected: the losses of the first steps; by default those of the first system.

    Raises:
      FiddlexError: when losses differ by more, or a driver ends or answers something else.
    """
    with contextlib.ExitStack() as stack:
        systems, answers = [], []
        for each in asked:
            own = dataclasses.replace(job, **each.own)
            systems.append(stack.enter_context(started(each.name, each.command, own)))
            answers.append(systems[-1].answer())
            expected = expected or Expected(each.name, answers[-1]["losses"])
            if not answers[-1]["differs"]:
                require_same_losses(expected, each.name, answers[-1]["losses"], tolerance)
            logger.info("%s is ready to be measured.", each.name)
        turns = [functools.partial(turn, system, steps=steps) for system in systems]
        times = measured(turns, rounds=rounds)
        peaks = [system.peak_bytes for system in systems]
    return [
        Result(
            each.name,
            answer["versions"],
            answer["losses"],
            answer["differs"],
            own_times,
            [other[0] / first[0] for first, other in zip(times[0], own_times, strict=True)],
            peak,
        )
        for each, answer, own_times, peak in zip(asked, answers, times, peaks, strict=True)
    ]


def require_same_losses(expected: Expected, name: str, losses: Sequence[float], tolerance: float) -> None:
    """Raises FiddlexError when a loss of the system `name` is not the one that is expected."""
    first, wanted = expected
    if len(losses) != len(wanted):
        raise FiddlexError(f"{name} told {len(losses)} losses, and {first} {len(wanted)}.")
    for step, (one, other) in enumerate(zip(wanted, losses, strict=True), start=1):
        if not abs(one - other) <= tolerance * abs(one):
            apart = f" ({abs(other / one - 1):.2%} apart)" if one and math.isfinite(other / one) else ""
            raise FiddlexError(
                f"step {step}: the loss of {first} is {one:.7g} and that of {name} {other:.7g}{apart}; the tolerance "
                f"is a difference of {tolerance:g}, relative to {first}. They do not train the same model on the same "
                "batches, so their times are not compared."
            )


def table(results: Sequence[Result], tokens_per_step: int) -> str:
    """The results as a Markdown table; `first` names the system that the others are compared with."""
    first, last = results[0].name, len(results[0].losses)
    rows = [
        f"| system | step, s | middle half of turns | tokens/s | CPU s of a step | {first}'s speed ÷ this system's | "
        f"middle half | loss of step {last} | device memory, GB |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    notes = []
    for result in results:
        record = result.to_record(tokens_per_step)
        if result.differs:
            notes.append(f"{result.name} does not train the same: {result.differs}.")
        rows.append(
            f"| {result.name}{' *' * bool(result.differs)} | {record['step_time_s']:.4g} | "
            f"{between(record['quartiles_s'])} | {record['tokens_per_second']:,.0f} | {record['cpu_s']:.4g} | "
            f"{record['speedup']:.3f} | {between(record['speedup_quartiles'])} | {result.losses[-1]:.5f} | "
            f"{'–' if result.peak_bytes is None else f'{result.peak_bytes / 1e9:.2f}'} |"
        )
    versions = dict.fromkeys(result.versions for result in results)
    return "\n".join([*rows, "", *(f"\\* {note}" for note in notes), "; ".join(versions)])


def quartiles(values: Sequence[float]) -> list[float]:
    """The values between which the middle half of all lies."""
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return [first, third]


def between(first_and_third: Sequence[float]) -> str:
    """Quartiles as text."""
    return " – ".join(f"{value:.4g}" for value in first_and_third)
