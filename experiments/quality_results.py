"""The runs of experiments.quality: what describes one, the file of finished ones, and tables of them."""

import collections
import dataclasses
import functools
import itertools
import pathlib
import statistics
from typing import Any

from experiments.results import read_results
from fiddlex.config import Config
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
        return f"{self.optimizer} {self.momentum if self.optimizer in ('sgd', 'muon') else self.beta1:g}"

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
            last_loss(records)
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
        losses = last[key]
        on_task = tasks[key]
        base = last.get(dataclasses.replace(key, semantics="sync", prediction="none"))
        numbers = (statistics.fmean(losses), min(losses), max(losses))
        against = f"{statistics.fmean(losses) / statistics.fmean(base) - 1:+.2%}" if base else ""
        cells = (
            key.model,
            key.steps,
            f"{key.learning_rate:g}",
            key.warmup_steps,
            key.recipe,
            len(losses),
            *(f"{n:.4f}" for n in numbers),
            against,
            f"{statistics.fmean(on_task):.1%}, {min(on_task):.1%} to {max(on_task):.1%}" if on_task else "",
        )
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)


def gap_table(results: Results) -> str:
    """Mean last held-out losses: a column for each semantics and prediction, with its gap to sync over common seeds."""
    rows: dict[tuple[Any, ...], dict[str, dict[int, float]]] = collections.defaultdict(dict)
    for case, records in results.items():
        row = rows[case.model, case.steps, case.rule, case.learning_rate, case.warmup_steps]
        row.setdefault(case.versions, {})[case.seed] = last_loss(records)
    found = {versions for row in rows.values() for versions in row} - {"sync"}
    columns = ["sync", *sorted(found, key=lambda versions: (not versions.startswith("2bw"), versions))]
    header = ("model", "steps", "optimizer", "peak rate", "warm-up", *columns)
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    for facts, row in sorted(rows.items()):
        sync = row.get("sync", {})
        cells = [f"{fact:g}" if isinstance(fact, float) else str(fact) for fact in facts]
        for versions in columns:
            losses = row.get(versions, {})
            common = losses.keys() & sync.keys() if versions != "sync" else set()
            gap = sum(losses[seed] for seed in common) / sum(sync[seed] for seed in common) - 1 if common else 0.0
            cell = f"{statistics.fmean(losses.values()):.4f}" if losses else ""
            cells.append(cell + (f" ({gap:+.1%})" if common else ""))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def best_table(results: Results) -> str:
    """For each recipe the peak rate with the lowest mean loss, against the best of the recipes that flush."""
    means = {key: statistics.fmean(losses) for key, losses in last_losses(results).items()}
    best: dict[tuple[str, int, str], QualityCase] = {}
    for key in sorted(means, key=means.__getitem__):
        best.setdefault((key.model, key.steps, key.recipe), key)
    header = ("model", "steps", "recipe", "best peak rate", "held-out loss", "against the best sync")
    rows = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    for (model, steps, recipe), key in sorted(best.items(), key=lambda item: (*item[0][:2], means[item[1]])):
        flushed = [means[k] for k in best.values() if (k.model, k.steps, k.semantics) == (model, steps, "sync")]
        against = f"{means[key] / min(flushed) - 1:+.2%}" if flushed else ""
        rows.append(f"| {model} | {steps} | {recipe} | {key.learning_rate:g} | {means[key]:.4f} | {against} |")
    return "\n".join(rows)


def last_losses(results: Results) -> dict[QualityCase, list[float]]:
    """The last held-out losses of all seeds, by the case with seed 0."""
    last: dict[QualityCase, list[float]] = collections.defaultdict(list)
    for case, records in sorted(results.items()):
        last[of_any_seed(case)].append(last_loss(records))
    return last


def of_any_seed(case: QualityCase) -> QualityCase:
    """The case with seed 0, under which the runs of all seeds are collected."""
    return dataclasses.replace(case, seed=0)


def equal_time_table(results: Results) -> str:
    """The best of the recipes that flush beside longer runs of the others that take as much time.

    The time is that of the lockstep clock, in which F, I and W of a stage take one unit each. A row compares runs if
    the longer has, to the nearest step, as many steps as fit into the time of the run that flushes.
    """
    means = {key: statistics.fmean(losses) for key, losses in last_losses(results).items()}
    header = ("model", "pipe", "microbatches", "flush", "held-out loss", "recipe", "held-out loss", "against sync")
    rows = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    groups: dict[tuple[Any, ...], list[QualityCase]] = collections.defaultdict(list)
    for key in means:
        groups[key.model, key.semantics == "sync", key.steps, key.recipe].append(key)
    best = [min(keys, key=means.__getitem__) for keys in groups.values()]
    flushed: dict[tuple[str, int], QualityCase] = {}
    for key in sorted((key for key in best if key.semantics == "sync"), key=means.__getitem__):
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
            f"{means[base]:.4f}",
            f"{key.recipe} at {key.learning_rate:g}, {key.steps} steps",
            f"{means[key]:.4f}",
            f"{means[key] / means[base] - 1:+.2%}",
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
