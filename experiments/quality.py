"""Trains the same models with and without delayed weights, over several seeds, and compares their losses.

    python -m experiments.quality --results=docs/studies/quality.jsonl [--seeds=3 --steps=2000 --models=gpt_4x128 …]
    python -m experiments.quality --results=docs/studies/quality.jsonl --plot=docs/studies/quality.svg
    python -m experiments.quality --results=docs/studies/prediction.jsonl --optimizer=muon --semantics=sync \
        --semantics=2bw --prediction=none --prediction=extrapolate:1:1.4 --learning_rates=4e-3 --learning_rates=8e-3

The models are byte-level and train on the source of Python's standard library (`stdlib`), with four stages and four
microbatches in a batch. All recipes of a seed have equal data, steps and initial weights. A BERT is then fine-tuned,
synchronously, on the task of configs/bert_swaps.py. Each finished run adds a line to the results, so that a stopped
study continues where it stopped. The tables and pictures show the runs that the flags ask for: each combination of
their values, without a prediction where weights are not delayed. `--plot` and `--plot_rates` draw those of them that
are finished and train nothing.
"""

import collections
import dataclasses
import itertools
import json
import logging
import math
import pathlib
import statistics
import tempfile
from collections.abc import Sequence
from typing import Any

from absl import flags

from experiments.results import append_result, read_results
from fiddlex.config import Config, MeshConfig, PipelineConfig
from fiddlex.config.command_line import load_config, run
from fiddlex.config.sections import OPTIMIZERS
from fiddlex.errors import ConfigError

SIZES = {  # layers, hidden size, heads
    "gpt_4x64": (4, 64, 2),
    "gpt_4x128": (4, 128, 4),
    "gpt_4x256": (4, 256, 8),
    "bert_4x64": (4, 64, 4),
}
TUNING = pathlib.Path(__file__).parents[1] / "configs/bert_swaps.py"
SEMANTICS = ("sync", "2bw", "stash")
COLOURS = {"sync": "#000000", "2bw": "#0072B2", "stash": "#D55E00"}  # Okabe and Ito's

logger = logging.getLogger("fiddlex.quality")

_RESULTS = flags.DEFINE_string("results", None, "JSON Lines file of finished runs, read and added to", required=True)
_SEEDS = flags.DEFINE_integer("seeds", 3, "seeds for each model and semantics", lower_bound=1)
_STEPS = flags.DEFINE_multi_integer("steps", [2000], "steps of a run", lower_bound=10)
_MODELS = flags.DEFINE_multi_enum("models", list(SIZES), list(SIZES), "models to train")
_SEMANTICS = flags.DEFINE_multi_string("semantics", list(SEMANTICS), "values of pipeline.semantics_schedule to compare")
_LEARNING_RATES = flags.DEFINE_multi_float("learning_rates", [1e-4], "peaks of the learning rate")
_WARMUPS = flags.DEFINE_multi_integer("warmup_steps", [50], "steps in which the learning rate rises", lower_bound=0)
_BETAS = flags.DEFINE_multi_float("beta1", [0.9], "optimizer.beta1")
_MOMENTA = flags.DEFINE_multi_float("momentum", [0.9], "optimizer.momentum")
_ADAMW_SCALES = flags.DEFINE_multi_float("adamw_scale", [1.0], "optimizer.adamw_scale")
_OPTIMIZERS = flags.DEFINE_multi_enum("optimizer", ["adamw"], list(OPTIMIZERS), "optimizers to compare")
_PREDICTIONS = flags.DEFINE_multi_string(
    "prediction", ["none"], "predictions of delayed weights, as in extrapolate:2:0.7 (order 2, scale 0.7)"
)
_PLOT = flags.DEFINE_string("plot", None, "picture of losses over steps to write; nothing is trained then")
_PLOT_RATES = flags.DEFINE_string("plot_rates", None, "picture of last losses over peak rates to write, likewise")


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
    adamw_scale: float = 1.0

    @property
    def recipe(self) -> str:
        """Optimizer, semantics and prediction, in words."""
        momentum = f" {self.momentum:g}" if self.optimizer in ("sgd", "muon") else f" {self.beta1:g}"
        momentum += f", AdamW's rate × {self.adamw_scale:g}" if self.adamw_scale != 1 else ""
        predicted = "" if self.prediction == "none" else f", {self.prediction}"
        return f"{self.optimizer}{momentum}, {self.semantics}{predicted}"


def main(argv: list[str]) -> None:
    """Trains the missing runs and prints the tables, or draws the results."""
    path = pathlib.Path(_RESULTS.value)
    path.parent.mkdir(parents=True, exist_ok=True)
    results, cases = read(path), asked()
    if _PLOT.value or _PLOT_RATES.value:
        found = {case: results[case] for case in cases if case in results}
        if not found:
            raise ConfigError(f"--results={path} has none of the runs asked for: run without --plot first.")
        if _PLOT.value:
            draw(found, pathlib.Path(_PLOT.value))
        if _PLOT_RATES.value:
            draw_rates(found, pathlib.Path(_PLOT_RATES.value))
        return
    for case in cases:
        if case not in results:
            results[case] = train(case)
            logger.info("%s: held-out loss %.4f", case, last_loss(results[case]))
            append_result(path, dataclasses.asdict(case) | {"records": results[case]})
    found = {case: results[case] for case in cases}
    print(table(found))
    print(f"\nThe best peak rate of each recipe:\n\n{best_table(found)}")


def asked() -> list[QualityCase]:
    """The runs that the flags ask for, without those that predict weights which are not delayed."""
    values: dict[str, Sequence[Any]] = {
        "seed": range(_SEEDS.value),
        "steps": _STEPS.value,
        "learning_rate": _LEARNING_RATES.value,
        "beta1": _BETAS.value,
        "momentum": _MOMENTA.value,
        "warmup_steps": _WARMUPS.value,
        "model": _MODELS.value,
        "adamw_scale": _ADAMW_SCALES.value,
        "optimizer": _OPTIMIZERS.value,
        "semantics": _SEMANTICS.value,
        "prediction": _PREDICTIONS.value,
    }
    cases = []
    for chosen in itertools.product(*values.values()):
        case = QualityCase(**dict(zip(values, chosen, strict=True)))
        cases.append(dataclasses.replace(case, prediction="none") if case.semantics == "sync" else case)
    return list(dict.fromkeys(cases))


def make_config(case: QualityCase) -> Config:
    """The config of a run."""
    config = Config()
    config.model.num_layers, config.model.hidden_size, config.model.num_heads = SIZES[case.model]
    config.model.seq_len, config.model.vocab_size = 128, 256
    # Four stages on one device give the same numbers as on four devices, and are faster than four fake devices.
    config.pipeline.schedule, config.pipeline.num_chunks, config.pipeline.num_microbatches = "interleaved_1f1b", 4, 4
    config.pipeline.semantics_schedule = case.semantics
    config.optimizer.learning_rate, config.optimizer.final_learning_rate = case.learning_rate, case.learning_rate / 10
    kind, order, scale, *_ = (*case.prediction.split(":"), "1", "1")
    config.pipeline.prediction, config.pipeline.prediction_order = kind, int(order)
    config.pipeline.prediction_scale = float(scale)
    config.optimizer.name, config.optimizer.beta1, config.optimizer.momentum = case.optimizer, case.beta1, case.momentum
    config.optimizer.adamw_scale = case.adamw_scale
    config.optimizer.warmup_steps, config.optimizer.weight_decay = case.warmup_steps, 0.1
    config.optimizer.clip_norm = 1.0
    config.data.source, config.data.global_batch_size, config.data.eval_batches = "stdlib", 16, 32
    if case.model.startswith("bert"):
        config.model.family, config.model.init_std, config.model.seq_len = "bert", 0.15, 32
        config.data.global_batch_size = 64
    config.train.num_steps, config.train.seed, config.data.seed = case.steps, case.seed, case.seed
    config.train.eval_every, config.train.checkpoint_every = max(case.steps // 10, 1), case.steps
    config.train.log_every = max(case.steps // 20, 1)
    return config


def train(case: QualityCase) -> list[dict[str, Any]]:
    """The records of a run: twenty training losses, ten held-out evaluations; for a BERT also its task accuracy."""
    from fiddlex.train import loop

    with tempfile.TemporaryDirectory() as folder:
        workdir = pathlib.Path(folder) / "run"
        loop.train(make_config(case), workdir)
        lines = (workdir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        names = ("step", "loss", "eval_loss", "eval_masked_accuracy")
        records = [{name: value for name, value in json.loads(line).items() if name in names} for line in lines]
        if case.model.startswith("bert"):
            records.append({"task_accuracy": fine_tuned(case, workdir)})
    return records


def fine_tuned(case: QualityCase, workdir: pathlib.Path) -> float:
    """The accuracy of a pretrained model on held-out lines of the task, after fine-tuning."""
    from fiddlex.data.documents import read_stdlib
    from fiddlex.data.swapped_words import write_task
    from fiddlex.train import loop

    config, folder = load_config(str(TUNING)), workdir.with_name("swaps")
    write_task(folder, read_stdlib(), fraction=0.05, longest=30, seed=0)
    config.model.hidden_size, config.mesh, config.pipeline = SIZES[case.model][1], MeshConfig(), PipelineConfig()
    config.data.source, config.data.eval_source = (f"jsonl:{folder}/{name}.jsonl" for name in ("train", "eval"))
    config.train.seed = config.data.seed = case.seed
    config.train.patience, config.train.init_from = 0, str(workdir)
    evaluation = loop.train(config, workdir.with_name("tuned")).evaluation
    assert evaluation is not None
    return float(evaluation["eval_accuracy"])


def read(path: pathlib.Path) -> dict[QualityCase, list[dict[str, Any]]]:
    """The finished runs in a file.

    Raises:
      ConfigError: when a line is not a finished run.
    """
    results: dict[QualityCase, list[dict[str, Any]]] = {}
    for number, entry in enumerate(read_results(path, ["records"]), start=1):
        records = entry.pop("records")
        try:
            results[QualityCase(**entry)] = records
        except TypeError as error:
            raise ConfigError(
                f"{path}, line {number}: not a run ({error}). Remove the line; its run is made again."
            ) from error
    return results


def last_loss(records: list[dict[str, Any]]) -> float:
    """The held-out loss at the end of a run."""
    return float([record["eval_loss"] for record in records if "eval_loss" in record][-1])


def table(results: dict[QualityCase, list[dict[str, Any]]]) -> str:
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
    for key, losses in last.items():
        on_task = tasks[key]
        base = last.get(dataclasses.replace(key, semantics="sync", prediction="none"), [math.nan])
        numbers = (statistics.fmean(losses), min(losses), max(losses))
        against = f"{statistics.fmean(losses) / statistics.fmean(base) - 1:+.2%}"
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


def best_table(results: dict[QualityCase, list[dict[str, Any]]]) -> str:
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


def last_losses(results: dict[QualityCase, list[dict[str, Any]]]) -> dict[QualityCase, list[float]]:
    """The last held-out losses of all seeds, by the case with seed 0."""
    last: dict[QualityCase, list[float]] = collections.defaultdict(list)
    for case, records in sorted(results.items()):
        last[of_any_seed(case)].append(last_loss(records))
    return last


def of_any_seed(case: QualityCase) -> QualityCase:
    """The case with seed 0, under which the runs of all seeds are collected."""
    return dataclasses.replace(case, seed=0)


def draw(results: dict[QualityCase, list[dict[str, Any]]], path: pathlib.Path) -> None:
    """Draws the curves of each model: mean held-out losses with their spread, and training losses more faintly."""
    from matplotlib.figure import Figure

    models = sorted({case.model for case in results})
    figure = Figure(figsize=(7.0, 3.2), layout="constrained")
    highest = 1.1 * max(next(r["eval_loss"] for r in records if "eval_loss" in r) for records in results.values())
    for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        for recipe in dict.fromkeys(case.recipe for case in results if case.model == model):
            runs = {case: records for case, records in results.items() if (case.model, case.recipe) == (model, recipe)}
            curves: dict[int, list[float]] = collections.defaultdict(list)
            for record in (record for records in runs.values() for record in records if "eval_loss" in record):
                curves[record["step"]].append(record["eval_loss"])
            steps, (first, *_) = sorted(curves), runs
            means = [statistics.fmean(curves[step]) for step in steps]
            colour = COLOURS.get(recipe.partition(", ")[2])
            (line,) = axes.plot(steps, means, color=colour, label=recipe, linewidth=1.2)
            low, high = ([pick(curves[step]) for step in steps] for pick in (min, max))
            axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
            training = [(record["step"], record["loss"]) for record in runs[first] if "loss" in record]
            axes.plot(*zip(*training, strict=True), color=line.get_color(), alpha=0.25, linewidth=0.6)
        axes.set(title=model, xlabel="step", ylabel="loss, nats per byte")
        axes.set_ylim(top=highest)
        axes.legend(fontsize=8, frameon=False)
    figure.savefig(path)
    print(f"wrote {path}")


def draw_rates(results: dict[QualityCase, list[dict[str, Any]]], path: pathlib.Path) -> None:
    """Draws, for each model, the last held-out loss of each recipe over the peak rate, with the spread over seeds."""
    from matplotlib.figure import Figure

    last, models = last_losses(results), sorted({case.model for case in results})
    figure = Figure(figsize=(3.6 * len(models), 3.6), layout="constrained")
    for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        for recipe in dict.fromkeys(case.recipe for case in last if case.model == model):
            of_recipe = {k.learning_rate: v for k, v in last.items() if (k.model, k.recipe) == (model, recipe)}
            rates = sorted(of_recipe)
            means = [statistics.fmean(of_recipe[rate]) for rate in rates]
            style = "-" if ", sync" in recipe else "--"
            (line,) = axes.plot(rates, means, style, label=recipe, marker=".", linewidth=1.2)
            low, high = ([pick(of_recipe[rate]) for rate in rates] for pick in (min, max))
            axes.fill_between(rates, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
        axes.set(title=model, xlabel="peak learning rate", ylabel="held-out loss, nats per byte", xscale="log")
        axes.legend(fontsize=7, frameon=False)
    figure.savefig(path)
    print(f"wrote {path}")


if __name__ == "__main__":
    run(main)
