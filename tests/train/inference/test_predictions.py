"""What a run says of each held-out example of a task, and what it is held against."""

import json
import math
import pathlib

import numpy as np
import pytest

from fiddlex.config import Config
from fiddlex.errors import ConfigError, DataError
from fiddlex.train.trainer import Trainer
from tests.train.bert import of_task, on_a_mesh, random_dataset, scored


@pytest.fixture
def config(tiny_config: Config) -> Config:
    tiny_config.model.vocab_size = 256
    return tiny_config


def write(config: Config, path: pathlib.Path, lines: list[str]) -> None:
    """A file of these lines as the config's data."""
    path.write_text("\n".join(lines))
    config.data.source = f"jsonl:{path}"


@pytest.mark.parametrize("task", ["classification", "multiple_choice"])
def test_predictions_are_those_of_the_plain_model(task: str, config: Config, tmp_path: pathlib.Path) -> None:
    config = on_a_mesh(of_task(config, task))
    config.model.post_norm, config.model.init_std = False, 0.5
    config.data.eval_fraction, config.data.text_fields = 0.25, "text"
    if task == "classification":
        config.data.labels = "c,a,b"
    labels = "abc" if task == "classification" else range(3)
    lines = [
        {"text": "xyz"[i % 3] * (3 + i % 5) + str(i), "choices": ["one", "two", f"x{i}"], "label": labels[i % 3]}
        for i in range(60)
    ]
    written = [*map(json.dumps, lines[:30]), "", *map(json.dumps, lines[30:])]
    write(config, tmp_path / "task.jsonl", written)
    trainer = Trainer(config)
    record, found, expected = trainer.evaluate(), trainer.predictions(), scored(trainer)
    assert len({line["guess"] for line in found}) > 1
    assert np.mean([line["right"] for line in found]) == pytest.approx(record["eval_accuracy"])
    assert [line["right"] for line in found] == expected["right_labels"].tolist()
    for line, loss in zip(found, expected["labels"], strict=True):
        assert line["label"] == json.loads(written[line["line"] - 1])["label"]
        shares = line["probabilities"]
        assert -math.log(shares[line["label"]]) == pytest.approx(loss, rel=1e-5, abs=1e-5)
        assert shares[line["guess"]] == max(shares.values() if task == "classification" else shares)
        assert sum(shares.values() if task == "classification" else shares) == pytest.approx(1)


def test_running_text_has_no_predictions(config: Config) -> None:
    with pytest.raises(ConfigError, match=r"model\.objective=mlm on random: predictions are told of labelled texts"):
        Trainer(of_task(config, "mlm"), random_dataset(config)).predictions()


def test_always_guessing_the_most_common_token(config: Config) -> None:
    config.data.eval_batches = 0
    trainer = Trainer(of_task(config, "mlm"), random_dataset(config))
    examples = [trainer.dataset.heldout.example(i, epoch=0) for i in range(37)]
    targets = np.concatenate([example["targets"][example["weights"] > 0] for example in examples])
    assert trainer.majority() == np.bincount(targets).max() / len(targets)


def test_a_file_left_from_other_data_is_told(config: Config, tmp_path: pathlib.Path) -> None:
    """As when data of one's own is laid over the config of another task."""
    write(of_task(config, "classification"), tmp_path / "task.jsonl", [json.dumps({"text": "x", "label": "a"})])
    path = tmp_path / "eval.jsonl"
    path.write_text('{"sentence": "x", "verdict": "a"}\n' * 3)
    config.data.eval_source, config.data.text_fields = f"jsonl:{path}", "text"
    for config.data.skip_bad_lines, start in ((False, "line 1: there is no key"), (True, "no line is left of 3")):
        with pytest.raises(DataError) as told:
            Trainer(config)
        assert str(told.value).startswith(f"data.eval_source: jsonl:{path}")
        assert start in str(told.value)
        assert str(told.value).endswith(
            "data.eval_source may be another file, or empty (--config.data.eval_source=) to hold out "
            "data.eval_fraction=0.05 of data.source."
        )
    config.data.skip_bad_lines = False
    path.write_text('{"text": "x", "label": "a"}\n{"label": "a"}\n')
    with pytest.raises(DataError, match=r"line 2: .*lines like it\.$"):
        Trainer(config)
