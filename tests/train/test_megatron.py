"""Runs on Megatron's datasets: the same bits as on the flat file of the same tokens in the same order."""

import copy
import json
import pathlib

import numpy as np
import pytest

from fiddlex.config import Config, DataConfig
from fiddlex.data.megatron.builder import indexed_builder
from fiddlex.train import loop
from fiddlex.train.trainer import Trainer


@pytest.fixture
def documents() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 257, length) for length in rng.integers(0, 90, 60)]


@pytest.fixture
def config(tiny_config: Config, tmp_path: pathlib.Path, documents: list[np.ndarray]) -> Config:
    for prefix, its_documents in {"a": documents, "b": documents[::-1]}.items():
        with indexed_builder(tmp_path / prefix, dtype=np.dtype("int32")) as builder:
            for document in its_documents:
                builder.add(document)
    tiny_config.model.hidden_size, tiny_config.model.num_layers = 16, 1
    tiny_config.data.source, tiny_config.data.split = f"megatron:{tmp_path / 'a'}", "4,1"
    tiny_config.optimizer.schedule = "constant"  # so that the run of three steps begins as that of six
    tiny_config.data.seed, tiny_config.data.global_batch_size = 5, 4
    tiny_config.train.num_steps, tiny_config.train.eval_every, tiny_config.train.checkpoint_every = 6, 3, 3
    return tiny_config


def losses(config: Config) -> list[float]:
    trainer = Trainer(config)
    return [record["loss"] for record in trainer.steps(6)] + [trainer.evaluate()["eval_loss"]]


def test_training_equals_that_on_a_flat_file(
    config: Config, documents: list[np.ndarray], tmp_path: pathlib.Path
) -> None:
    order = np.arange(48)
    np.random.RandomState(5).shuffle(order)
    np.concatenate([documents[each] for each in order]).astype("<u2").tofile(tmp_path / "train.bin")
    np.concatenate(documents[48:]).astype("<u2").tofile(tmp_path / "val.bin")
    flat = copy.deepcopy(config)
    flat.data.source, flat.data.split = f"tokens:{tmp_path}", DataConfig.split
    assert losses(config) == losses(flat)


@pytest.mark.parametrize("blend", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_resumed_run_goes_on_exactly(config: Config, tmp_path: pathlib.Path, blend: bool) -> None:
    if blend:
        config.data.source = f"megatron:0.6:{tmp_path / 'a'},0.4:{tmp_path / 'b'}"
    loop.train(config, tmp_path / "whole")
    first = copy.deepcopy(config)
    first.train.num_steps = 3
    loop.train(first, tmp_path / "parts")
    assert loop.train(config, tmp_path / "parts").step == 6
    timed = ("_s", "_second", "_device")
    texts = [
        [{name: x for name, x in record.items() if not name.endswith(timed)} for record in records]
        for records in (read(tmp_path / name) for name in ("whole", "parts"))
    ]
    assert [r for r in texts[0] if "loss" in r] == [r for r in texts[1] if "loss" in r]


def read(workdir: pathlib.Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
