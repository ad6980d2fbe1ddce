"""The runs of experiments.quality: what describes one, the file of finished ones, and tables of them."""

import collections
import dataclasses
import functools
import itertools
import pathlib
import statistics
from collections.abc import Mapping
from typing import Any

from experiments.results import read_results
from fiddlex.config import Config, OptimizerConfig
from fiddlex.config.overrides import replaced
from fiddlex.errors import ConfigError
from fiddlex.schedules.resolve import resolve
from fiddlex.simulate.clock import Costs
from fiddlex.simulate.steady import mean_batch_time

Records = list[dict[str, Any]]  # of one run: its training losses and its evaluations
Results = dict["QualityCase", Records]


@dataclasses.dataclass(frozen=True, order=True)
class QualityCase:
    """One run."""

    model: str
    semantics: str
    seed: int
    steps: int
    learning_rate: float
    beta1: float
    warmup_steps: int = 50
    optimizer: str = "adamw"
    momentum: float = 0.9
    prediction: str = "none"

    @property
    def rule(self) -> str:
        """The optimizer and the decay of its momentum."""
        optimizer = OptimizerConfig(self.optimizer, beta1=self.beta1, momentum=self.momentum)
        return f"{self.optimizer} {optimizer.decay_of_momentum:g}"

    @property
    def versions(self) -> str:
        """Semantics and prediction."""
        return self.semantics + ("" if self.prediction == "none" else f", {self.prediction}")

    @property
    def recipe(self) -> str:
        """Optimizer, semantics and prediction."""
        return f"{self.rule}, {self.versions}"


def parse_prediction(text: str) -> tuple[str, int, int | float]:
    """The kind, order and scale of a prediction, as in `momentum:2` or `extrapolate:2:0.7`.

    Raises:
      ConfigError: when the text is not of this form.
    """
    kind, *others = text.split(":")
    try:
        order, scale = (*map(float, others), *[1.0] * (2 - len(others)))
        if not order.is_integer():
            raise ValueError
    except (ValueError, OverflowError) as error:
        raise ConfigError(
            f"--prediction={text} is not of the form KIND, KIND:ORDER or KIND:ORDER:SCALE, as in extrapolate:2:0.7."
        ) from error
    return kind, int(order), int(scale) if scale.is_integer() else scale


def read(path: pathlib.Path) -> Results:
    """The finished runs in a file.

    Raises:
      ConfigError: when a line is not a finished run.
    """
    results: Results = {}
    for number, entry in enumerate(read_results(path, ["records"]), start=1):
        try:
            records = entry.pop("records")
            case = QualityCase(**entry)
            wrong = [f.name for f in dataclasses.fields(case) if not _is_of(getattr(case, f.name), f.type)]
            if wrong:
                raise TypeError(f"{wrong[0]}={getattr(case, wrong[0])!r}")
            step = max(record["step"] for record in records if "eval_loss" in record)
            if step < case.steps:
                raise ValueError(f"it ended at step {step} of {case.steps}")
        except (TypeError, ValueError, AttributeError, LookupError) as error:
            raise ConfigError(
                f"{path}, line {number}: not a run ({error}). Remove the line; its run is made again."
            ) from error
        results[case] = records
    return results


def _is_of(value: Any, kind: Any) -> bool:
    return type(value) is kind or (kind is float and type(value) is int)


def last_loss(records: Records) -> float:
    """The held-out loss at the end of a run."""
    return float([record["eval_loss"] for record in records if "eval_loss" in record][-1])


def table(results: Results) -> str:
    """Mean and spread of the last held-out losses, and their difference from those of sync."""
    tasks: dict[QualityCase, list[float]] = collections.defaultdict(list)
    for case, records in sorted(results.items()):
        tasks[of_any_seed(case)] += [record["task_accuracy"] for record in records if "task_accuracy" in record]
    header = (
        "model",
        "steps",
        "peak rate",
        "warm-up",
        "recipe",
        "runs",
        "held-out loss",
        "lowest",
        "highest",
        "against sync",
        "task, lowest and highest",
    )
    rows = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    last = last_losses(results)
    for key in sorted(last, key=lambda k: (k.model, k.steps, k.optimizer, k.learning_rate, k.semantics != "sync", k)):
        losses, on_task = last[key], tasks[key]
        base = last.get(dataclasses.replace(key, semantics="sync", prediction="none"), {})
        numbers = (mean(losses), min(losses.values()), max(losses.values()))
        cells = (
            key.model,
            key.steps,
            f"{key.learning_rate:g}",
            key.warmup_steps,
            key.recipe,
            len(losses),
            *(f"{n:.4f}" for n in numbers),
            gap(losses, base),
            f"{statistics.fmean(on_task):.1%}, {min(on_task):.1%} to {max(on_task):.1%}" if on_task else "",
        )
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)


def gap_table(results: Results) -> str:
    """Mean last held-out losses: a column for each semantics and prediction, with its gap to sync over common seeds."""
    rows: dict[tuple[Any, ...], dict[str, dict[int, float]]] = collections.defaultdict(dict)
    for key, of_seeds in last_losses(results).items():
        row = rows[key.model, key.steps, key.rule, key.learning_rate, key.warmup_steps]
        row.setdefault(key.versions, {}).update(of_seeds)
    found = {versions for row in rows.values() for versions in row} - {"sync"}
    columns = ["sync", *sorted(found, key=lambda versions: (not versions.startswith("2bw"), versions))]
    header = ("model", "steps", "optimizer", "peak rate", "warm-up", *columns)
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    for facts, row in sorted(rows.items()):
        sync = row.get("sync", {})
        cells = [f"{fact:g}" if isinstance(fact, float) else str(fact) for fact in facts]
        for versions in columns:
            losses = row.get(versions, {})
            cell = f"{mean(losses):.4f}" if losses else ""
            against = gap(losses, sync, 1) if versions != "sync" else ""
            cells.append(cell + (f" ({against})" if against else ""))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def best_table(results: Results) -> str:
    """For each recipe the peak rate with the lowest mean loss, against the best of the recipes that flush."""
    last, best = last_losses(results), best_rates(results)
    header = ("model", "steps", "recipe", "best peak rate", "runs", "held-out loss", "against the best sync")
    rows = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    for key in best:
        flushed = next((k for k in best if (k.model, k.steps, k.semantics) == (key.model, key.steps, "sync")), key)
        against = gap(last[key], last[flushed]) if flushed.semantics == "sync" else ""
        facts = (key.model, key.steps, key.recipe, f"{key.learning_rate:g}", len(last[key]), f"{mean(last[key]):.4f}")
        rows.append(f"| {' | '.join(map(str, facts))} | {against} |")
    return "\n".join(rows)


def best_rates(results: Results) -> list[QualityCase]:
    """Each recipe at the peak rate with its lowest mean loss, by model and steps, the lowest loss first."""
    last = last_losses(results)
    best: dict[tuple[str, int, str], QualityCase] = {}
    for key in sorted(last, key=lambda key: mean(last[key])):
        best.setdefault((key.model, key.steps, key.recipe), key)
    return sorted(best.values(), key=lambda key: (key.model, key.steps, mean(last[key])))


def last_losses(results: Results) -> dict[QualityCase, dict[int, float]]:
    """The last held-out losses by seed, by the case with seed 0."""
    last: dict[QualityCase, dict[int, float]] = collections.defaultdict(dict)
    for case, records in sorted(results.items()):
        last[of_any_seed(case)][case.seed] = last_loss(records)
    return last


def mean(losses: Mapping[int, float]) -> float:
    """The mean over seeds."""
    return statistics.fmean(losses.values())


def gap(losses: Mapping[int, float], base: Mapping[int, float], digits: int = 2) -> str:
    """The mean of losses against the mean of others, over the seeds that both have; empty if there are none."""
    common = losses.keys() & base.keys()
    if not common:
        return ""
    return f"{sum(losses[seed] for seed in common) / sum(base[seed] for seed in common) - 1:+.{digits}%}"


def of_any_seed(case: QualityCase) -> QualityCase:
    """The case with seed 0, under which the runs of all seeds are collected."""
    return dataclasses.replace(case, seed=0)


def equal_time_table(results: Results) -> str:
    """The best of the recipes that flush beside longer runs of the others that take as much time.

    The time is that of 1F1B in the lockstep clock, in which F, I and W of a stage take one unit each. A row compares
    runs if the longer has, to the nearest step, as many steps as fit into the time of the run that flushes.
    """
    last, best = last_losses(results), best_rates(results)
    header = ("model", "pipe", "microbatches", "flush", "held-out loss", "recipe", "held-out loss", "against sync")
    rows = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    flushed: dict[tuple[str, int], QualityCase] = {}
    for key in best:
        if key.semantics == "sync":
            flushed.setdefault((key.model, key.steps), key)
    for (pipe, num_microbatches), base, key in itertools.product(((8, 16), (8, 8)), flushed.values(), best):
        if key.model != base.model or key.semantics in ("sync", "auto"):
            continue
        speed = batch_time("sync", base.steps, pipe, num_microbatches) / batch_time(
            key.semantics, key.steps, pipe, num_microbatches
        )
        if key.steps != round(base.steps * speed):
            continue
        cells = (
            key.model,
            pipe,
            num_microbatches,
            f"{base.recipe} at {base.learning_rate:g}, {base.steps} steps",
            f"{mean(last[base]):.4f}",
            f"{key.recipe} at {key.learning_rate:g}, {key.steps} steps",
            f"{mean(last[key]):.4f}",
            gap(last[key], last[base]),
        )
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)


@functools.cache
def batch_time(semantics: str, steps: int, pipe: int, num_microbatches: int) -> float:
    """The mean time of a batch in the lockstep clock, under 1F1B with one layer on each of `pipe` ranks."""
    values = {
        "model.num_layers": pipe,
        "mesh.pipe": pipe,
        "pipeline.num_microbatches": num_microbatches,
        "pipeline.semantics_schedule": semantics,
        "data.global_batch_size": num_microbatches,
        "train.num_steps": steps,
    }
    return mean_batch_time(resolve(replaced(Config(), values).validate()), Costs())
