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

import dataclasses
import itertools
import json
import logging
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any

from absl import flags

from experiments.quality_results import (
    QualityCase,
    Records,
    best_table,
    equal_time_table,
    gap_table,
    last_loss,
    parse_prediction,
    read,
    table,
)
from experiments.results import append_result
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
            raise ConfigError(f"--results={path} has none of the runs asked for: run without --plot first.")
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


def make_config(case: QualityCase) -> Config:
    """The config of a run."""
    config = Config()
    config.model.num_layers, config.model.hidden_size, config.model.num_heads = SIZES[case.model]
    config.model.seq_len, config.model.vocab_size = 128, 256
    # Four stages on one device give the same numbers as on four devices, and are faster than four fake devices.
    config.pipeline.schedule, config.pipeline.num_chunks, config.pipeline.num_microbatches = "interleaved_1f1b", 4, 4
    config.pipeline.semantics_schedule = case.semantics
    config.optimizer.learning_rate, config.optimizer.final_learning_rate = case.learning_rate, case.learning_rate / 10
    config.pipeline.prediction, config.pipeline.prediction_order, scale = parse_prediction(case.prediction)
    config.pipeline.prediction_scale = float(scale)
    config.optimizer.name, config.optimizer.beta1, config.optimizer.momentum = case.optimizer, case.beta1, case.momentum
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


def train(case: QualityCase) -> Records:
    """The records of a run: 20 training losses, 10 evaluations, decisions of `auto`; for a BERT also task accuracy."""
    from fiddlex.train import loop

    with tempfile.TemporaryDirectory() as folder:
        workdir = pathlib.Path(folder) / "run"
        loop.train(make_config(case), workdir)
        lines = (workdir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        names = ("step", "loss", "eval_loss", "eval_masked_accuracy", "semantics", "semantics_from_step")
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


if __name__ == "__main__":
    run(main)
