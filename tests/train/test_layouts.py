"""Every layout trains as one device does: losses, gradient norms and weights against a plain reference."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

from fiddlex.config import Config
from fiddlex.data import Loader
from fiddlex.models import dropout
from fiddlex.train import gradients
from fiddlex.train.trainer import Trainer
from tests import reference

TOLERANCE = 1e-5  # relative, float32, five steps
NUM_LAYERS = 4
# Stages on ranks 0, 2, 0 and 1, two of them with I and W apart: hops either way, chunks that some ranks lack.
ODD_TABLE = pathlib.Path(__file__).parents[1] / "pipeline" / "odd.csv"


@dataclasses.dataclass(frozen=True)
class Case:
    data: int
    tensor: int
    sequence_parallel: bool = False
    zero1: bool = True
    microbatches: int = 1
    dropout: float = 0.1
    recompute: str = "none"
    optimizer: str = "sgd"
    pipe: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    layers_per_stage: str = ""
    semantics: str = "sync"

    @property
    def num_steps(self) -> int:
        return 5 if self.semantics == "sync" else 10

    def __str__(self) -> str:
        words = [f"{self.data}x{self.pipe}x{self.tensor}", pathlib.Path(self.schedule).stem]
        words += [f"v{self.chunks}", f"m{self.microbatches}"]
        words += ["sp"] * self.sequence_parallel + ["zero"] * self.zero1 + ["dropout"] * (self.dropout > 0)
        words += [self.recompute, self.optimizer, *filter(None, [self.layers_per_stage.replace(",", "")])]
        return "-".join([*words, *[self.semantics] * (self.semantics != "sync")])

    def apply(self, config: Config) -> Config:
        config.model.num_layers = NUM_LAYERS
        config.mesh.data, config.mesh.pipe, config.mesh.tensor = self.data, self.pipe, self.tensor
        config.mesh.sequence_parallel = self.sequence_parallel
        config.pipeline.schedule, config.pipeline.num_chunks = self.schedule, self.chunks
        config.pipeline.layers_per_stage = self.layers_per_stage
        config.pipeline.num_microbatches = self.microbatches
        config.pipeline.recompute = self.recompute
        config.pipeline.semantics, config.train.num_steps = self.semantics, self.num_steps
        config.model.dropout = self.dropout
        config.optimizer.zero1 = self.zero1
        config.optimizer.name = self.optimizer
        config.optimizer.schedule = "constant"
        config.optimizer.learning_rate = 0.1 if self.optimizer == "sgd" else 1e-3
        # optax.adafactor does not multiply its decay by the learning rate and ours does; tests/train/test_optimizer.py.
        config.optimizer.weight_decay = 0.0 if self.optimizer == "adafactor" else 0.1
        config.optimizer.clip_norm = 0.5
        # The bias of the keys has no effect on attention, so its gradient is rounding noise around zero; at Adam's
        # usual 1e-8 that noise would be scaled up to whole steps, differently in any two programs.
        config.optimizer.epsilon = 1e-6
        return config


CASES = [
    Case(1, 1),
    Case(1, 1, microbatches=4, recompute="full"),
    Case(2, 1),
    Case(2, 1, microbatches=8, zero1=False, dropout=0.0),
    Case(1, 2, dropout=0.0, recompute="selective"),
    Case(1, 2, sequence_parallel=True),
    Case(2, 2, microbatches=2),
    Case(2, 2, microbatches=4, sequence_parallel=True, recompute="full"),
    Case(2, 2, zero1=False, optimizer="adamw"),
    Case(4, 2, microbatches=2, optimizer="adamw"),
    Case(4, 2, sequence_parallel=True, recompute="selective"),
    Case(2, 4, zero1=False),
    Case(2, 4, microbatches=4, sequence_parallel=True, optimizer="adamw"),
    Case(2, 2, optimizer="adam"),
    Case(2, 4, optimizer="lamb"),
    Case(4, 2, optimizer="adafactor"),
    Case(1, 1, pipe=2, microbatches=4),
    Case(2, 2, pipe=2, microbatches=2, schedule="interleaved_1f1b", chunks=2, optimizer="adamw"),
    Case(2, 2, pipe=2, microbatches=4, schedule="interleaved_1f1b", chunks=2, sequence_parallel=True),
    Case(1, 1, pipe=4, microbatches=8, recompute="full"),
    Case(2, 1, pipe=4, microbatches=2, schedule="gpipe", recompute="selective"),
    Case(1, 2, pipe=4, microbatches=1, sequence_parallel=True, recompute="full"),
    Case(1, 1, pipe=3, microbatches=4),
    Case(2, 1, pipe=2, microbatches=4, layers_per_stage="3,1", recompute="selective"),
    Case(1, 2, pipe=2, microbatches=4, schedule="interleaved_1f1b", chunks=2, layers_per_stage="1,1,1,1"),
    Case(1, 1, pipe=3, microbatches=4, schedule="zb_h1", layers_per_stage="1,2,1", recompute="full"),
    Case(2, 2, pipe=2, microbatches=4, schedule="zb_h1", sequence_parallel=True),
    Case(1, 1, pipe=4, microbatches=8, schedule="zb_h1", optimizer="adamw"),
    Case(2, 1, pipe=4, microbatches=8, schedule="zb_h2", dropout=0.0),
    Case(1, 2, pipe=2, microbatches=4, schedule="zb_v", chunks=2, recompute="full"),
    Case(2, 2, pipe=2, microbatches=2, schedule="zb_v", chunks=2, sequence_parallel=True, recompute="selective"),
    Case(1, 1, pipe=1, microbatches=4, schedule="interleaved_1f1b", chunks=3, layers_per_stage="1,2,1"),
    Case(2, 1, pipe=3, microbatches=4, schedule=f"file:{ODD_TABLE}", chunks=2),
    Case(4, 1, pipe=2, microbatches=4, optimizer="lamb", layers_per_stage="1,3"),
    Case(2, 1, pipe=2, microbatches=2, optimizer="adafactor", layers_per_stage="3,1"),
    Case(1, 1, pipe=2, microbatches=2, semantics="2bw"),
    Case(2, 1, pipe=2, microbatches=2, semantics="2bw", optimizer="adamw"),
    Case(1, 1, pipe=4, microbatches=8, semantics="2bw", recompute="full"),
    Case(2, 1, pipe=4, microbatches=4, semantics="2bw", optimizer="adamw"),
    Case(2, 2, pipe=2, microbatches=4, semantics="2bw", schedule="interleaved_1f1b", chunks=2, sequence_parallel=True),
    Case(1, 2, pipe=2, microbatches=2, semantics="2bw", zero1=False, layers_per_stage="3,1", recompute="selective"),
    Case(1, 1, pipe=4, microbatches=8, semantics="2bw", schedule="zb_h1", optimizer="adamw"),
    Case(2, 1, pipe=2, microbatches=4, semantics="2bw", schedule="zb_v", chunks=2, optimizer="lamb"),
    Case(2, 1, pipe=3, microbatches=4, semantics="2bw", schedule=f"file:{ODD_TABLE}", chunks=2),
    Case(1, 1, pipe=4, microbatches=8, semantics="2bw", schedule="gpipe", dropout=0.0),
    Case(2, 2, microbatches=2, semantics="2bw"),
    Case(1, 1, pipe=4, microbatches=1, semantics="stash"),
    Case(2, 1, pipe=2, microbatches=1, semantics="stash", optimizer="adamw"),
    Case(1, 2, pipe=2, microbatches=4, semantics="stash", schedule="interleaved_1f1b", chunks=2, optimizer="adamw"),
    Case(2, 2, pipe=2, microbatches=4, semantics="stash", schedule="zb_h1", layers_per_stage="1,3"),
    Case(1, 1, pipe=4, microbatches=1, semantics="vertical_sync", optimizer="adamw"),
    Case(2, 2, pipe=2, microbatches=1, semantics="vertical_sync", sequence_parallel=True),
    Case(1, 1, pipe=3, microbatches=4, semantics="vertical_sync", layers_per_stage="2,1,1"),
    Case(2, 1, pipe=2, microbatches=2, semantics="vertical_sync", schedule="zb_v", chunks=2),
    Case(1, 1, pipe=2, microbatches=2, semantics="delay:3", optimizer="adamw"),
]

_references: dict[tuple[float, str, int, reference.Delays], dict[str, Any]] = {}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layout_trains_as_the_reference_does(case: Case, tiny_config: Config) -> None:
    trainer = Trainer(case.apply(tiny_config))
    initial = trainer.weights()
    check_training(trainer, case, expected_training(case, tiny_config, trainer, initial))


def test_masks_drawn_in_parts_train_alike(tiny_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropout, "MOST_AT_ONCE", 1000)
    case = Case(1, 2, pipe=2, microbatches=4, schedule="zb_h1", recompute="selective")
    test_layout_trains_as_the_reference_does(case, tiny_config)


def test_what_lasts_in_row_major_order_trains_alike(tiny_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs."""
    monkeypatch.setitem(gradients.TILES, "cpu", gradients.TILES["gpu"])
    case = Case(2, 2, pipe=2, microbatches=4, schedule="zb_h1", semantics="2bw", sequence_parallel=True)
    test_layout_trains_as_the_reference_does(case, tiny_config)


def check_training(trainer: Trainer, case: Case, expected: dict[str, Any]) -> None:
    """Trains, and holds losses, gradient norms and weights against the reference's."""
    records = list(trainer.steps(case.num_steps))
    np.testing.assert_allclose([r["loss"] for r in records], expected["losses"], rtol=TOLERANCE)
    np.testing.assert_allclose([r["grad_norm"] for r in records], expected["norms"], rtol=TOLERANCE)
    weights = reference.unstack(trainer.weights())
    assert jax.tree.structure(weights) == jax.tree.structure(expected["weights"])
    for path, weight in jax.tree_util.tree_leaves_with_path(weights):
        wanted = leaf_at(expected["weights"], path)
        if case.optimizer == "adafactor" and jax.tree_util.keystr(path).endswith("['qkv']['bias']"):
            continue  # it scales by the whole tensor's size and has no epsilon to damp the noise of the keys' bias
        difference = np.linalg.norm(weight - wanted) / np.linalg.norm(wanted)
        assert difference < TOLERANCE, f"{jax.tree_util.keystr(path)}: relative difference {difference:.2e}"


def expected_training(case: Case, config: Config, trainer: Trainer, initial: Any) -> dict[str, Any]:
    """The reference's run; layouts share it, since they must not differ but by the delay of their weights."""
    delays = delays_of(case.semantics, trainer.layout.placement.layers_per_stage)
    key = (case.dropout, case.optimizer, case.num_steps, delays)
    if key not in _references:
        loader = Loader(trainer.dataset.train, global_batch_size=config.data.global_batch_size, seed=0, vocab_size=257)
        batches = [loader.batch(step) for step in range(case.num_steps)]
        _references[key] = reference.train(config, initial, batches, lambda step: delays)
    return _references[key]


def delays_of(semantics: str, layers_per_stage: Sequence[int]) -> reference.Delays:
    """What the papers say of each stage's weights: PipeDream, section 3.3, and 2BW, section 3.1."""
    n = len(layers_per_stage)
    by_stage = {
        "sync": [0] * n,
        "2bw": [1] * n,
        "stash": [n - 1 - stage for stage in range(n)],
        "vertical_sync": [n - 1] * n,
        "delay:3": [3] * n,
    }[semantics]
    layers = [delay for delay, count in zip(by_stage, layers_per_stage, strict=True) for _ in range(count)]
    return reference.Delays(by_stage[0], tuple(layers), by_stage[-1])


def leaf_at(tree: Any, path: Any) -> np.ndarray:
    for entry in path:
        tree = tree[entry.key if hasattr(entry, "key") else entry.idx]
    return np.asarray(tree)
