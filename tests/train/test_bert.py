"""BERT as a Trainer runs it: evaluation, what padding and packing may not change, and from one run to the next."""

import copy
import dataclasses
import json
import math
import pathlib
import shutil
from typing import Any

import chex
import jax
import numpy as np
import pytest

from fiddlex.config import Config
from fiddlex.config.overrides import replaced
from fiddlex.costs.sizes import num_parameters
from fiddlex.data.dataset import Dataset
from fiddlex.data.statistics import wilson_interval
from fiddlex.errors import CheckpointError, ConfigError
from fiddlex.train import loop
from fiddlex.train.run.checkpoints.checkpoint import Checkpoints
from fiddlex.train.run.workdir import check_same_run
from fiddlex.train.trainer import Trainer, load_trainer
from tests.train.bert import of_task, on_a_mesh, random_dataset, scored

TASKS = ("mlm", "mlm_nsp", "classification", "multiple_choice")


@pytest.fixture
def config(tiny_config: Config) -> Config:
    """On a pipe of two ranks with two chunks, and two tensor ranks that share the sequence."""
    return on_a_mesh(of_task(tiny_config, "mlm_nsp"))


@pytest.mark.parametrize(
    "task",
    [
        pytest.param("mlm", marks=pytest.mark.long),
        "mlm_nsp",
        pytest.param("multiple_choice", marks=pytest.mark.long),
        pytest.param("classification", marks=pytest.mark.long),
    ],
)
def test_evaluation_is_that_of_the_plain_model(task: str, config: Config) -> None:
    trainer = Trainer(of_task(config, task), random_dataset(config))
    list(trainer.steps(3))
    record, expected = trainer.evaluate(), scored(trainer)
    means = [expected[part].mean() for part in ("tokens", "labels") if part in expected]
    assert record["eval_loss"] == pytest.approx(sum(means), rel=1e-5)
    assert record["step"] == 3
    if "tokens" in expected:
        assert record["eval_tokens"] == len(expected["tokens"])
        assert record["eval_perplexity"] == pytest.approx(math.exp(means[0]), rel=1e-4)
        assert record["eval_masked_accuracy"] == pytest.approx(expected["right_tokens"].mean())
    if "labels" in expected:
        name = "eval_pair_accuracy" if "tokens" in expected else "eval_accuracy"
        right = expected["right_labels"]
        assert record["eval_examples"] == len(right) == 37
        assert record[name] == pytest.approx(right.mean())
        assert (record[f"{name}_low"], record[f"{name}_high"]) == wilson_interval(int(right.sum()), 37)
    if len(means) == 2:
        assert [record["eval_masked_loss"], record["eval_pair_loss"]] == pytest.approx(means, rel=1e-5)


@pytest.mark.parametrize("post_norm", [True, False])
@pytest.mark.parametrize("task", TASKS)
def test_weights_are_whole_and_counted_right(task: str, post_norm: bool, config: Config) -> None:
    of_task(config, task).model.post_norm = post_norm
    weights = Trainer(config, random_dataset(config)).weights()
    assert weights["embedding"]["tokens"].shape == (257, 32)
    assert sum(leaf.size for leaf in jax.tree.leaves(weights)) == num_parameters(config)


@dataclasses.dataclass(frozen=True)
class Given:
    """Examples as they are."""

    examples: list[dict[str, np.ndarray]]

    def __len__(self) -> int:
        return len(self.examples)

    def example(self, index: int, *, epoch: int) -> dict[str, np.ndarray]:
        return self.examples[index]


def evaluated(config: Config, examples: list[dict[str, np.ndarray]]) -> float:
    dataset = Dataset("given", "given", "given", Given(examples), Given(examples), tokenizer=None)
    return Trainer(config, dataset).evaluate()["eval_loss"]


def example(pieces: list[np.ndarray], length: int = 16, padding: int = 0) -> dict[str, np.ndarray]:
    """Pieces one after another, each a segment of which the second token is to be told."""
    joined, starts = np.concatenate(pieces), np.cumsum([0, *map(len, pieces)])[:-1]
    numbers = np.repeat(np.arange(1, len(pieces) + 1), [len(piece) for piece in pieces])
    found = {name: np.zeros(length, np.int32) for name in ("tokens", "segments", "token_types")}
    found["tokens"][:] = padding
    found["tokens"][: len(joined)], found["segments"][: len(joined)] = joined, numbers
    found |= {name: np.zeros(2, np.int32) for name in ("masked_positions", "targets")}
    found["weights"] = np.zeros(2, np.float32)
    found["masked_positions"][: len(starts)], found["weights"][: len(starts)] = starts + 1, 1
    found["targets"][: len(starts)] = [piece[0] for piece in pieces]
    return found


def test_pieces_in_one_example_see_nothing_of_each_other_nor_padding(config: Config) -> None:
    of_task(config, "mlm")
    rng = np.random.default_rng(0)
    long, short = rng.integers(1, 257, 9), rng.integers(1, 257, 4)
    packed = evaluated(config, [example([long, short])])
    apart = evaluated(config, [example([long]), example([short], padding=7)])
    other = evaluated(config, [example([long]), example([short], padding=200)])
    assert packed == pytest.approx(apart, rel=1e-5)
    assert apart == other
    assert packed != pytest.approx(evaluated(config, [example([np.concatenate([long, short])])]), rel=1e-3)


def test_a_batch_without_a_masked_token_changes_no_weight(config: Config) -> None:
    of_task(config, "mlm").optimizer.weight_decay = 0.0
    empty = example([np.arange(1, 9)])
    empty["weights"][:] = 0
    dataset = Dataset("given", "given", "given", Given([empty]), None, tokenizer=None)
    trainer = Trainer(config, dataset)
    before = trainer.weights()
    assert [record["loss"] for record in trainer.steps(2)] == [0, 0]
    chex.assert_trees_all_equal(trainer.weights(), before)


@pytest.mark.long
def test_another_run_gives_what_both_models_have(config: Config, tmp_path: pathlib.Path) -> None:
    config.train.checkpoint_every = config.train.num_steps = 3
    trained = loop_with(random_dataset(config), config, tmp_path / "pretrained")
    task = of_task(copy.deepcopy(config), "classification")
    task.mesh.pipe, task.mesh.tensor, task.mesh.data = 1, 4, 1
    task.mesh.sequence_parallel, task.pipeline.num_chunks, task.model.seq_len = False, 1, 12
    trainer = Trainer(task, random_dataset(task))
    fresh = trainer.weights()
    trainer.start_from(str(tmp_path / "pretrained"))
    weights, given = trainer.weights(), trained.weights()
    chex.assert_trees_all_equal(weights["layers"], given["layers"])
    chex.assert_trees_all_equal(weights["head"]["label"]["pooler"], given["head"]["label"]["pooler"])
    chex.assert_trees_all_equal(weights["head"]["label"]["classifier"], fresh["head"]["label"]["classifier"])
    assert weights["head"].keys() == {"label"}
    chex.assert_trees_all_equal(weights["embedding"]["positions"], given["embedding"]["positions"][:12])
    chex.assert_trees_all_equal(weights["embedding"]["tokens"], given["embedding"]["tokens"])
    assert all(math.isfinite(record["loss"]) for record in trainer.steps(2))
    task.model.hidden_size, task.model.seq_len = 64, 32
    with pytest.raises(CheckpointError, match=r"(?s)hidden_size is 64, was 32\n.*seq_len is 32, above the 16") as told:
        Trainer(task, random_dataset(task)).start_from(str(tmp_path / "pretrained"))
    assert "mlp_size" not in str(told.value)
    assert "ffn_size" not in str(told.value)  # it follows from hidden_size, and nobody set it
    task.model.hidden_size, task.model.ffn_size = 32, 64
    with pytest.raises(CheckpointError, match=r"model\.ffn_size is 64, was 128"):
        Trainer(task, random_dataset(task)).start_from(str(tmp_path / "pretrained"))
    with pytest.raises(CheckpointError) as told:
        load_trainer(tmp_path / "pretrained", lambda config: of_task(copy.deepcopy(config), "classification"))
    assert str(told.value) == (
        f"The weights in --workdir={tmp_path}/pretrained are those of another model:\n  model.objective is "
        "'classification', was 'mlm_nsp'\n  data.labels is 'a,b,c', was ''\nLeave these fields as they are there. To "
        "do something else with what it has learnt, fine-tune it first: fiddlex train with "
        f"--config.model.objective=classification, --config.train.init_from={tmp_path}/pretrained "
        "and a --workdir of its own."
    )


@pytest.mark.parametrize("saved", ["", "/runs/first"])
def test_another_start_is_another_run(saved: str, config: Config, tmp_path: pathlib.Path) -> None:
    other = copy.deepcopy(config)
    config.train.init_from, other.train.init_from = saved, "/runs/second"
    with pytest.raises(CheckpointError, match=rf"train\.init_from is '/runs/second', was '{saved}'\n.*new --workdir"):
        check_same_run(config, other, tmp_path)
    for same in {saved, saved and "/runs/x/../first/", ""}:  # it has started from there
        other.train.init_from = same
        check_same_run(config, other, tmp_path)


def loop_with(dataset: Dataset, config: Config, workdir: pathlib.Path) -> Trainer:
    """A run of the loop on given data; then its trainer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fiddlex.train.trainer.load_dataset", lambda config, shared: dataset)
        loop.train(config, workdir)
        return load_trainer(workdir)


@pytest.fixture
def task_config(tiny_config: Config, tmp_path: pathlib.Path) -> Config:
    """Texts of one letter and their class, which a few steps learn; one in eight is labelled wrongly."""
    letters = np.random.default_rng(0).integers(0, 3, 200)
    lines = [{"text": "xyz"[c] * (3 + i % 5), "label": "abc"[(c + (i % 8 == 0)) % 3]} for i, c in enumerate(letters)]
    path = tmp_path / "task.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = of_task(tiny_config, "classification")
    config.data.source, config.data.text_fields, config.data.eval_fraction = f"jsonl:{path}", "text", 0.25
    config.data.eval_batches, config.model.vocab_size = 0, 256
    config.optimizer.learning_rate, config.optimizer.schedule = 1e-2, "constant"
    config.train.num_steps, config.train.eval_every, config.train.checkpoint_every = 400, 20, 20
    return config


def test_a_run_ends_when_it_gets_no_better_and_keeps_its_best_also_when_resumed(
    task_config: Config, tmp_path: pathlib.Path
) -> None:
    task_config.train.patience = 3
    outcome = loop.train(task_config, tmp_path / "run")
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    evaluations = [record for record in records if "eval_loss" in record]
    merits = [(record["eval_accuracy"], -record["eval_loss"]) for record in evaluations]
    best = merits.index(max(merits))
    assert outcome.step < 400
    assert outcome.stopped_by is None
    assert len(evaluations) == best + 4
    assert outcome.evaluation == evaluations[best]
    assert outcome.evaluation["eval_accuracy"] > 0.7
    assert load_trainer(tmp_path / "run").evaluate() == evaluations[best]
    again = loop.train(task_config, tmp_path / "run")  # has nothing left to do
    assert (again.step, again.record, again.evaluation) == (outcome.step, None, evaluations[best])

    part = copy.deepcopy(task_config)
    part.train.num_steps = 40
    loop.train(part, tmp_path / "parts")
    resumed = loop.train(task_config, tmp_path / "parts")
    assert (resumed.step, resumed.evaluation) == (outcome.step, outcome.evaluation)


@pytest.mark.long
def test_best_weights_of_steps_that_are_trained_again_are_made_again(
    task_config: Config, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A kill after an evaluation and before the next checkpoint; then the best weights themselves are lost."""
    config, run = task_config, tmp_path / "run"
    config.train.patience, config.train.num_steps, config.train.checkpoint_every = 9, 60, 40
    whole = loop.train(config, run)
    assert whole.evaluation is not None
    shutil.rmtree(run / "checkpoints/60")
    best = whole.evaluation["step"]
    again = loop.train(config, run)
    assert again.evaluation == whole.evaluation
    assert load_trainer(run).evaluate() == whole.evaluation
    assert (run / "damaged_checkpoints").exists() == (best == 60)
    shutil.rmtree(run / "best")
    with caplog.at_level("WARNING"):
        assert load_trainer(run).evaluate()["step"] == 60
    assert f"those of step {best}, which are not in" in caplog.text
    config.train.num_steps = 80
    resumed = loop.train(config, run)
    assert resumed.evaluation is not None
    assert resumed.evaluation["step"] == 80


def test_an_evaluation_that_a_kill_cut_short_is_made_on_resume(task_config: Config, tmp_path: pathlib.Path) -> None:
    task_config.train.num_steps, task_config.train.log_every = 40, 0
    loop.train(task_config, tmp_path)
    metrics = tmp_path / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    assert len(lines) == 3  # the last one is the record of goodput
    metrics.write_text(lines[0])
    loop.train(task_config, tmp_path)
    assert metrics.read_text() == "".join(lines)


def test_a_model_that_sees_both_ways_writes_no_text(config: Config) -> None:
    with pytest.raises(ConfigError, match="cannot go on with a text"):
        Trainer(config, random_dataset(config)).generate("a", 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model.objective": "lm"}, "model.family=bert: model.objective='lm' is not one of mlm, mlm_nsp"),
        (
            {"data.source": "tsv:x"},
            "data.source='tsv:x' with model.objective=mlm_nsp: its data is one of stdlib, text:",
        ),
        (
            {"data.eval_source": "jsonl:x"},
            "megatron:PREFIX. Labelled texts are for a run with model.objective=classification or multiple_choice,",
        ),
        ({"model.objective": "classification"}, "with model.objective=classification: its data is one of tsv:PATH"),
        (
            {"model.objective": "classification", "data.source": "tsv:x", "data.labels": "a"},
            "data.labels='a' with model.objective=classification: name at least two classes",
        ),
        ({"data.labels": "a,b"}, "data.labels=a,b with model.objective=mlm_nsp: it changes nothing"),
        (
            {"model.objective": "classification", "data.source": "tsv:x", "data.labels": "a,a"},
            "each class has a name of its own",
        ),
        ({"data.mask_fraction": 0.0}, "data.mask_fraction=0.0 must be greater than 0"),
        ({"train.patience": 2}, "train.patience=2 with train.eval_every=0"),
        ({"train.sample_tokens": 2}, "train.sample_tokens=2 with model.objective=mlm_nsp"),
        ({"data.eval_stride": 8}, "only running text of lm is scored in windows that overlap"),
        ({"model.family": "gpt", "model.objective": "lm"}, "model.post_norm=True with model.family=gpt"),
        (
            {"model.family": "gpt", "model.objective": "", "model.post_norm": False, "data.eval_stride": 17},
            "data.eval_stride=17 is above model.seq_len=16",
        ),
    ],
)
def test_what_does_not_go_together_is_told(fields: dict[str, Any], message: str, config: Config) -> None:
    with pytest.raises(ConfigError) as error:
        replaced(config, fields).validate()
    assert message in str(error.value)


def test_what_was_learnt_is_read_again_on_another_layout(config: Config, tmp_path: pathlib.Path) -> None:
    trainer = Trainer(config, random_dataset(config))
    list(trainer.steps(2))
    other = copy.deepcopy(config)
    other.mesh.pipe, other.mesh.tensor, other.mesh.data, other.mesh.sequence_parallel = 4, 1, 1, False
    other.pipeline.schedule, other.pipeline.num_chunks, other.pipeline.semantics = "zb_h1", 1, "sync"
    with Checkpoints(tmp_path) as checkpoints:
        trainer.save(checkpoints)
    resumed = Trainer(other, random_dataset(other))
    with Checkpoints(tmp_path) as checkpoints:
        assert resumed.restore(checkpoints)
    chex.assert_trees_all_equal(resumed.weights(), trainer.weights())
    expected = [record["loss"] for record in trainer.steps(3)]
    np.testing.assert_allclose([record["loss"] for record in resumed.steps(3)], expected, rtol=1e-5)
