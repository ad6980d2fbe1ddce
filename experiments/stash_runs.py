"""Trains the models of experiments.stash_dtypes, and compares their gradients with exact ones.

The models are small byte-level GPTs of two layers, in two stages on one device, in float32, so that the codec is the
only rounding to few bits. Attention runs in no fused kernel, so that its probabilities are stashed too.
"""

import dataclasses
import pathlib
import tempfile

from experiments.quality_results import QualityCase, Records
from experiments.quality_runs import make_config as quality_config
from experiments.quality_runs import records_of
from fiddlex.config import Config

LAYERS, STAGES, LEARNING_RATE = 2, 2, 2e-3
# What a layer of these models stashes of its activations, in the order in which it does.
KINDS = (
    "result of the first norm",
    "queries",
    "keys",
    "probabilities",
    "values",
    "result of attention",
    "input of the second norm",
    "result of the second norm",
    "input of GELU",
    "result of GELU",
)


@dataclasses.dataclass(frozen=True, order=True)
class StashCase:
    """One run."""

    hidden: int
    stash_dtype: str
    seed: int
    steps: int
    recompute: str = "none"


def make_config(case: StashCase) -> Config:
    """The config of a run, that of experiments.quality but for the stash and the number of layers."""
    quality = QualityCase(f"gpt_4x{case.hidden}", "sync", case.seed, case.steps, LEARNING_RATE, beta1=0.9)
    config = quality_config(quality)
    config.model.num_layers, config.pipeline.num_chunks, config.pipeline.num_microbatches = LAYERS, STAGES, STAGES
    config.pipeline.stash_dtype, config.pipeline.recompute = case.stash_dtype, case.recompute
    return config


def train(case: StashCase) -> Records:
    """The records of a run: 20 training losses and 10 evaluations."""
    with tempfile.TemporaryDirectory() as folder:
        return records_of(make_config(case), pathlib.Path(folder) / "run")
