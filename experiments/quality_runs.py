"""Trains the models of experiments.quality."""

import json
import pathlib
import sys
import tempfile
from typing import TYPE_CHECKING

from experiments.quality_results import QualityCase, Records, parse_prediction
from fiddlex.config import Config, MeshConfig, PipelineConfig
from fiddlex.config.files import load_config

if TYPE_CHECKING:
    from fiddlex.train.loop import Outcome

SIZES = {  # layers, hidden size, heads
    "gpt_4x64": (4, 64, 2),
    "gpt_4x128": (4, 128, 4),
    "gpt_4x256": (4, 256, 8),
    "bert_4x64": (4, 64, 4),
}
TUNING = pathlib.Path(__file__).parents[1] / "configs/bert_swaps.py"


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
    return config.without_unused()  # each optimizer uses beta1 or momentum


def train(case: QualityCase) -> Records:
    """The records of a run: 20 training losses, 10 evaluations, decisions of `auto`; for a BERT also task accuracy."""
    with tempfile.TemporaryDirectory() as folder:
        workdir = pathlib.Path(folder) / "run"
        records = records_of(make_config(case), workdir)
        if case.model.startswith("bert"):
            records.append({"task_accuracy": fine_tuned(case, workdir)})
    return records


def records_of(config: Config, workdir: pathlib.Path) -> Records:
    """The losses and evaluations of a run, and its decisions about semantics; trains to the end."""
    _run(config, workdir)
    lines = (workdir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    names = ("step", "loss", "eval_loss", "eval_masked_accuracy", "semantics", "semantics_from_step")
    return [{name: value for name, value in json.loads(line).items() if name in names} for line in lines]


def _run(config: Config, workdir: pathlib.Path) -> "Outcome":
    """Trains to the end; a signal that stops the run before ends the study, so that no such run counts as finished."""
    from fiddlex.train import loop

    outcome = loop.train(config, workdir)
    if outcome.stopped_by:
        sys.exit(128 + outcome.stopped_by.signal)
    return outcome


def fine_tuned(case: QualityCase, workdir: pathlib.Path) -> float:
    """The accuracy of a pretrained model on held-out lines of the task, after fine-tuning."""
    from fiddlex.data.documents import read_stdlib
    from fiddlex.tools.swapped_words import write_task

    config, folder = load_config(str(TUNING)), workdir.with_name("swaps")
    write_task(folder, read_stdlib(), fraction=0.05, longest=30, seed=0)
    config.model.hidden_size, config.mesh, config.pipeline = SIZES[case.model][1], MeshConfig(), PipelineConfig()
    config.data.source, config.data.eval_source = (f"jsonl:{folder}/{name}.jsonl" for name in ("train", "eval"))
    config.train.seed = config.data.seed = case.seed
    config.train.patience, config.train.init_from = 0, str(workdir)
    evaluation = _run(config, workdir.with_name("tuned")).evaluation
    assert evaluation is not None
    return float(evaluation["eval_accuracy"])
