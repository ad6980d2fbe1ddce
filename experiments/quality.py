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
are finished and train nothing; `--finished` takes all finished runs in their place.
"""

import dataclasses
import itertools
import logging
import pathlib
from collections.abc import Sequence
from typing import Any

from absl import flags

from experiments.quality_results import (
    QualityCase,
    best_table,
    equal_time_table,
    gap_table,
    last_loss,
    parse_prediction,
    read,
    table,
)
from experiments.quality_runs import SIZES, make_config, train
from experiments.results import append_result
from fiddlex.config.sections import OPTIMIZERS
from fiddlex.errors import ConfigError
from fiddlex.terminal.command_line import run

SEMANTICS = ("sync", "2bw", "stash")

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
_OPTIMIZERS = flags.DEFINE_multi_enum("optimizer", ["adamw"], list(OPTIMIZERS), "optimizers to compare")
_PREDICTIONS = flags.DEFINE_multi_string(
    "prediction", ["none"], "predictions of delayed weights, as in extrapolate:2:0.7 (order 2, scale 0.7)"
)
_FINISHED = flags.DEFINE_bool("finished", False, "show all finished runs, whatever the other flags, and train nothing")
_PLOT = flags.DEFINE_string("plot", None, "picture of losses over steps to write; nothing is trained then")
_PLOT_RATES = flags.DEFINE_string("plot_rates", None, "picture of last losses over peak rates to write, likewise")


def main(argv: list[str]) -> None:
    """Trains the missing runs and prints the tables, or draws the results."""
    path = pathlib.Path(_RESULTS.value)
    path.parent.mkdir(parents=True, exist_ok=True)
    results = read(path)
    cases = sorted(results) if _FINISHED.value else asked()
    if _PLOT.value or _PLOT_RATES.value or _FINISHED.value:
        cases = [case for case in cases if case in results]
        if not cases:
            raise ConfigError(f"--results={path} has none of the runs asked for: train them first, without --plot.")
    for case in cases:
        if case not in results:
            results[case] = train(case)
            logger.info("%s: held-out loss %.4f", case, last_loss(results[case]))
            append_result(path, dataclasses.asdict(case) | {"records": results[case]})
    found = {case: results[case] for case in cases}
    if _PLOT.value or _PLOT_RATES.value:
        from experiments import quality_pictures

        if _PLOT.value:
            quality_pictures.draw(found, pathlib.Path(_PLOT.value))
        if _PLOT_RATES.value:
            quality_pictures.draw_rates(found, pathlib.Path(_PLOT_RATES.value))
        return
    print(table(found))
    print(f"\nThe gaps:\n\n{gap_table(found)}")
    print(f"\nThe best peak rate of each recipe:\n\n{best_table(found)}")
    print(f"\nIn the time of the best sync, by the lockstep clock:\n\n{equal_time_table(found)}")


def asked() -> list[QualityCase]:
    """The runs that the flags ask for, without those that predict weights which are not delayed.

    Raises:
      ConfigError: when the config of one of them is not valid.
    """
    values: dict[str, Sequence[Any]] = {
        "seed": range(_SEEDS.value),
        "steps": _STEPS.value,
        "learning_rate": _LEARNING_RATES.value,
        "beta1": _BETAS.value,
        "momentum": _MOMENTA.value,
        "warmup_steps": _WARMUPS.value,
        "model": _MODELS.value,
        "optimizer": _OPTIMIZERS.value,
        "semantics": _SEMANTICS.value,
        "prediction": _PREDICTIONS.value,
    }
    cases = []
    for chosen in itertools.product(*values.values()):
        case = QualityCase(**dict(zip(values, chosen, strict=True)))
        kind = "none" if case.semantics == "sync" else ":".join(map(str, parse_prediction(case.prediction)))
        case = dataclasses.replace(case, prediction=kind.removesuffix(":1").removesuffix(":1"))
        make_config(case).validate()
        cases.append(case)
    return list(dict.fromkeys(cases))


if __name__ == "__main__":
    run(main)
