"""The engine reads nothing but what the schedule has put there."""

import functools
import math

import chex
import pytest

from fiddlex.config import Config
from fiddlex.pipeline.engine import Engine
from fiddlex.pipeline.executor import execute
from fiddlex.train import gradients, windowed
from fiddlex.train.trainer import Trainer
from tests.train.bert import random_dataset

LAYOUTS = {
    "gpipe with few microbatches": ("gpipe", 4, 1, 2, "", "sync"),
    "1f1b with uneven stages": ("1f1b", 4, 1, 8, "1,2,1,1", "sync"),
    "interleaved": ("interleaved_1f1b", 2, 2, 4, "", "sync"),
    "whole and split backwards in one table": ("file:mixed.csv", 2, 1, 2, "", "sync"),
    "split backwards in a V": ("zb_v", 2, 2, 4, "1,2,1,1", "sync"),
    "split backwards": ("zb_h2", 4, 1, 8, "", "sync"),
    "from batch to batch with stalls": ("1f1b", 4, 1, 4, "1,2,1,1", "2bw:3,sync"),
    "from batch to batch with split backwards": ("zb_h1", 2, 1, 4, "", "stash:2,2bw"),
    "masked language model": ("interleaved_1f1b", 2, 2, 4, "", "sync"),
    "masked language model from batch to batch": ("zb_v", 2, 2, 4, "1,2,1,1", "sync:2,2bw"),
}
MIXED = "0F0,0F1,0B0,0I1,0W1\n1F0,1I0,1F1,1W0,1B1\n"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_idle_slots_hold_changes_nothing(
    layout: str, tiny_config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("schedules"))
    with open("mixed.csv", "w") as file:
        file.write(MIXED)
    schedule, pipe, chunks, microbatches, layers, tiny_config.pipeline.semantics_schedule = LAYOUTS[layout]
    tiny_config.model.num_layers, tiny_config.model.dropout, tiny_config.mesh.pipe = 5, 0.1, pipe
    tiny_config.pipeline.schedule, tiny_config.pipeline.num_chunks = schedule, chunks
    tiny_config.pipeline.num_microbatches, tiny_config.pipeline.layers_per_stage = microbatches, layers
    dataset = None
    if layout.startswith("masked"):
        tiny_config.model.family, tiny_config.model.objective, tiny_config.model.post_norm = "bert", "mlm_nsp", True
        dataset = random_dataset(tiny_config)
    weights = []
    for fill in (0.0, math.nan):
        monkeypatch.setattr(gradients, "execute", functools.partial(execute, fill=fill))
        monkeypatch.setattr(windowed, "Engine", functools.partial(Engine, fill=fill))
        trainer = Trainer(tiny_config, dataset)
        records = list(trainer.steps(2 if tiny_config.pipeline.semantics_schedule == "sync" else 5))
        weights.append((records[-1]["loss"], trainer.evaluate()["eval_loss"], trainer.weights()))
    chex.assert_trees_all_equal(*weights)
