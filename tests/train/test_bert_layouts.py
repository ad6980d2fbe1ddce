"""Every layout trains BERT as one device does; `test_layouts` says what a case is, and gives the tolerance."""

import dataclasses
from typing import Any

import pytest

from fiddlex.config import Config
from fiddlex.data import Loader
from fiddlex.train.trainer import Trainer
from tests import reference, reference_bert
from tests.train.bert import random_dataset
from tests.train.test_layouts import ODD_TABLE, Case, check_training, delays_of


@dataclasses.dataclass(frozen=True)
class BertCase(Case):
    objective: str = "mlm_nsp"
    post_norm: bool = True

    def __str__(self) -> str:
        return "-".join([self.objective, "post" if self.post_norm else "pre", super().__str__()])

    def apply(self, config: Config) -> Config:
        super().apply(config)
        config.model.family, config.model.objective, config.model.post_norm = "bert", self.objective, self.post_norm
        config.data.labels, config.data.num_choices = "a,b,c", 3
        if self.objective in ("classification", "multiple_choice"):
            config.data.source = "jsonl:none"  # the examples are made up
        return config


CASES = [
    BertCase(1, 1),
    BertCase(2, 1, microbatches=8, post_norm=False),
    BertCase(2, 2, microbatches=2, sequence_parallel=True),
    BertCase(2, 2, microbatches=2, sequence_parallel=True, post_norm=False, recompute="selective"),
    BertCase(2, 4, zero1=False, optimizer="adamw", objective="mlm"),
    BertCase(4, 2, microbatches=2, optimizer="lamb", recompute="full"),
    BertCase(4, 2, objective="classification", sequence_parallel=True),
    BertCase(2, 2, objective="multiple_choice", microbatches=2, optimizer="adamw"),
    BertCase(1, 1, pipe=4, microbatches=8, recompute="full"),
    BertCase(2, 2, pipe=2, microbatches=2, schedule="interleaved_1f1b", chunks=2, optimizer="adamw"),
    BertCase(2, 2, pipe=2, microbatches=4, schedule="interleaved_1f1b", chunks=2, sequence_parallel=True),
    BertCase(2, 2, pipe=2, microbatches=4, schedule="zb_h1", sequence_parallel=True, objective="classification"),
    BertCase(2, 1, pipe=2, microbatches=4, schedule="zb_h1", recompute="full", post_norm=False),
    BertCase(2, 1, pipe=4, microbatches=8, schedule="zb_h2", dropout=0.0, objective="mlm"),
    BertCase(1, 2, pipe=2, microbatches=4, schedule="zb_v", chunks=2, objective="multiple_choice"),
    BertCase(2, 1, pipe=3, microbatches=4, schedule=f"file:{ODD_TABLE}", chunks=2, recompute="selective"),
    BertCase(2, 1, pipe=4, microbatches=2, schedule="gpipe", layers_per_stage="1,1,1,1"),
    BertCase(1, 2, pipe=2, microbatches=4, layers_per_stage="3,1", sequence_parallel=True, objective="multiple_choice"),
    BertCase(1, 1, pipe=4, microbatches=8, semantics="2bw", optimizer="adamw"),
    BertCase(2, 2, pipe=2, microbatches=4, semantics="2bw", schedule="interleaved_1f1b", chunks=2, post_norm=False),
    BertCase(2, 2, pipe=2, microbatches=2, semantics="2bw", sequence_parallel=True, objective="classification"),
    BertCase(2, 1, pipe=2, microbatches=4, semantics="2bw", schedule="zb_v", chunks=2, objective="mlm"),
    BertCase(2, 2, pipe=2, microbatches=4, semantics="stash", schedule="zb_h1", layers_per_stage="1,3"),
    BertCase(1, 1, pipe=3, microbatches=4, semantics="vertical_sync", layers_per_stage="2,1,1", objective="mlm"),
    BertCase(1, 2, pipe=2, microbatches=2, semantics="delay:3", objective="classification", optimizer="adamw"),
]

_references: dict[Any, dict[str, Any]] = {}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layout_trains_as_the_reference_does(case: BertCase, tiny_config: Config) -> None:
    config = case.apply(tiny_config)
    trainer = Trainer(config, random_dataset(config))
    initial = trainer.weights()
    check_training(trainer, case, expected_training(case, config, trainer, initial))


def expected_training(case: BertCase, config: Config, trainer: Trainer, initial: Any) -> dict[str, Any]:
    """The reference's run; layouts share it, since they must not differ but by the delay of their weights."""
    delays = delays_of(case.semantics, trainer.layout.placement.layers_per_stage)
    key = (case.objective, case.post_norm, case.dropout, case.optimizer, case.num_steps, delays)
    if key not in _references:
        loader = Loader(trainer.dataset.train, global_batch_size=16, seed=0, vocab_size=257)
        batches = [loader.batch(step) for step in range(case.num_steps)]
        assert len({batch["weights"].sum() for batch in batches if "weights" in batch}) != 1  # unequal counts
        _references[key] = reference.train(config, initial, batches, lambda step: delays, reference_bert.loss_fn)
    return _references[key]
