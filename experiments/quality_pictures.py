"""Pictures of the runs of experiments.quality."""

import collections
import pathlib
import statistics

from matplotlib.figure import Figure

from experiments.quality_results import Results, last_losses
from fiddlex.errors import ConfigError

COLOURS = {"sync": "#000000", "2bw": "#0072B2", "stash": "#D55E00"}  # Okabe and Ito's


def draw(results: Results, path: pathlib.Path) -> None:
    """Draws the curves of each model: mean held-out losses with their spread, and training losses more faintly."""
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
    _save(figure, path)


def draw_rates(results: Results, path: pathlib.Path) -> None:
    """Draws, for each model, the last held-out loss of each recipe over the peak rate, with the spread over seeds."""
    last, models = last_losses(results), sorted({case.model for case in results})
    figure = Figure(figsize=(3.6 * len(models), 3.6), layout="constrained")
    for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        for recipe in dict.fromkeys(case.recipe for case in last if case.model == model):
            of_recipe = {
                k.learning_rate: list(v.values()) for k, v in last.items() if (k.model, k.recipe) == (model, recipe)
            }
            rates = sorted(of_recipe)
            means = [statistics.fmean(of_recipe[rate]) for rate in rates]
            style = "-" if ", sync" in recipe else "--"
            (line,) = axes.plot(rates, means, style, label=recipe, marker=".", linewidth=1.2)
            low, high = ([pick(of_recipe[rate]) for rate in rates] for pick in (min, max))
            axes.fill_between(rates, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
        axes.set(title=model, xlabel="peak learning rate", ylabel="held-out loss, nats per byte", xscale="log")
        axes.legend(fontsize=7, frameon=False)
    _save(figure, path)


def _save(figure: Figure, path: pathlib.Path) -> None:
    formats = figure.canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in formats:
        raise ConfigError(f"{path}: the ending of a picture's name is its format, one of {', '.join(formats)}.")
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error}). Name a file in a folder that exists.") from error
    print(f"wrote {path}")
