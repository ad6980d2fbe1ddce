"""The parts of experiments.stash_dtypes: training runs, errors of gradients, and costs of a layer's passes.

The models that are trained are small byte-level GPTs of two layers, in two stages on one device, in float32, so that
the codec is the only rounding to few bits. Attention runs in no fused kernel, so that its probabilities are stashed
too.
"""

import dataclasses
import math
import pathlib
import tempfile
import time
import unittest.mock
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import P, lax

from experiments.benchmarks.programs import make_program
from experiments.quality_results import QualityCase, Records
from experiments.quality_runs import make_config as quality_config
from experiments.quality_runs import records_of
from fiddlex.cluster.mesh import make_mesh, make_topology_mesh
from fiddlex.config import Config
from fiddlex.config.files import load_config
from fiddlex.config.sections import AXES
from fiddlex.errors import DeviceError
from fiddlex.models.registry import make_model
from fiddlex.parallel.collectives import as_varying
from fiddlex.pipeline.codec import Codec, codec_of
from fiddlex.pipeline.residuals import Arrays, SplitVjp
from fiddlex.train.step import gradients
from fiddlex.train.step.feed import Feed
from fiddlex.train.step.program import Program
from fiddlex.train.step.state import make_layout
from fiddlex.train.trainer import Trainer

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
REPEATS = 40  # of the steps whose times are compared
# Types of the stash, and microbatches; the last differs from the first only in the order of sums.
VARIANTS = (("same", 2), ("int8", 2), ("float8_e4m3fn", 2), ("same", 4))


@dataclasses.dataclass(frozen=True, order=True)
class StashCase:
    """One training run.

    Attributes:
      hidden: the model's hidden size.
      stash_dtype: `pipeline.stash_dtype`.
      microbatches: `pipeline.num_microbatches`.
      seed: of the weights and the order of the data.
      steps: number of steps.
    """

    hidden: int
    stash_dtype: str
    microbatches: int
    seed: int
    steps: int


def make_config(case: StashCase) -> Config:
    """The config of a run, that of experiments.quality but for the stash and the number of layers."""
    quality = QualityCase(f"gpt_4x{case.hidden}", "sync", case.seed, case.steps, LEARNING_RATE, beta1=0.9)
    config = quality_config(quality)
    config.model.num_layers, config.pipeline.num_chunks = LAYERS, STAGES
    config.pipeline.stash_dtype, config.pipeline.num_microbatches = case.stash_dtype, case.microbatches
    return config


def train(case: StashCase) -> Records:
    """The records of a run: 20 training losses and 10 evaluations."""
    with tempfile.TemporaryDirectory() as folder:
        return records_of(make_config(case), pathlib.Path(folder) / "run")


class _OneKind:
    """A stand-in for a codec that rounds only the activation at one place of the order of `KINDS`.

    Args:
      codec: the codec whose rounding it is.
      place: the place of the activation.
    """

    def __init__(self, codec: Codec, place: int):
        self._codec, self._place, self._calls = codec, place, 0

    def encode(self, x: jax.Array) -> Arrays:
        """A pair as of `Codec.encode`, whose first array is decoded already."""
        mine, self._calls = self._calls % len(KINDS) == self._place, self._calls + 1
        encoded = self._codec.encode(x)
        return [self._codec.decode(encoded, x.dtype) if mine else x, encoded[1]]

    def decode(self, encoded: Arrays, dtype: jnp.dtype) -> jax.Array:
        """The first array of the pair."""
        return encoded[0].astype(dtype)


def gradient_errors(hidden: int, stash_dtype: str, steps: int) -> dict[str, float]:
    """Errors of the gradient of all weights after some exact steps, relative to its norm.

    Returns:
      The error by the kind that is encoded, and under `all` that with every activation encoded.
    """
    config = make_config(StashCase(hidden, "same", 2, 0, 2000)).validate()
    trainer = Trainer(config)
    list(trainer.steps(steps))
    state, batch = trainer.state, next(Feed(trainer.dataset, config, trainer.mesh).train(steps))

    def gradient(codec: Any) -> Any:
        with unittest.mock.patch.object(gradients, "codec_of", return_value=codec):
            program = Program(config, make_mesh(config.mesh))
            return jax.jit(program.source.gradients)(state, batch)[1]

    exact, codec = gradient(None), codec_of(stash_dtype)
    assert codec is not None
    found = {"all": gradient(codec)} | {kind: gradient(_OneKind(codec, place)) for place, kind in enumerate(KINDS)}
    return {kind: _distance(each, exact) / _distance(exact) for kind, each in found.items()}


def _distance(first: Any, second: Any = None) -> float:
    """The norm of the difference of two trees, or that of one tree."""
    if second is not None:
        first = jax.tree.map(jnp.subtract, first, second)
    return math.sqrt(sum(float(jnp.square(leaf).sum()) for leaf in jax.tree.leaves(first)))


def step_seconds(hidden: int, stash_dtypes: Sequence[str]) -> dict[str, float]:
    """Seconds of a training step on this machine, the least of `REPEATS` steps of each, taken in turn."""
    steps: dict[str, list[Any]] = {}
    for stash_dtype in stash_dtypes:
        program = make_program(make_config(StashCase(hidden, stash_dtype, 2, 0, 2000)))
        shapes = program.source.abstract_inputs
        batch = {name: jnp.ones(each.shape, each.dtype) for name, each in shapes.items()}
        steps[stash_dtype] = [program.lower().compile(), program.init_state(), batch]
    seconds = dict.fromkeys(steps, math.inf)
    for _ in range(REPEATS):
        for stash_dtype, (compiled, state, batch) in steps.items():
            start = time.perf_counter()
            steps[stash_dtype][1], _ = jax.block_until_ready(compiled(state, batch))
            seconds[stash_dtype] = min(seconds[stash_dtype], time.perf_counter() - start)
    return seconds


def layer_costs(path: str, topology: str, stash_dtype: str, examples: int) -> dict[str, float]:
    """XLA's count of the operations of a layer's two passes, and of the bytes that they read and write.

    Args:
      path: the config of the model.
      topology: one device, as experiments/compile.py takes it.
      stash_dtype: `pipeline.stash_dtype`.
      examples: examples in the microbatch.

    Raises:
      DeviceError: when XLA counts nothing for the device, as it does for GPUs.
    """
    config = load_config(path)
    config.mesh, config.pipeline.stash_dtype = type(config.mesh)(), stash_dtype
    config.data.global_batch_size, config.pipeline.num_microbatches = examples, 1
    mesh, model = make_topology_mesh(config.validate().mesh, topology), make_model(config)
    layer = gradients.pipeline_model(model, config, mesh, model.loss).layer
    split, dtype = SplitVjp(layer, codec=codec_of(stash_dtype)), jnp.dtype(config.model.dtype)
    layout = make_layout(model, config)
    again: Any = jnp.int32(0), {}  # the number of the layer, and nothing of the microbatch
    specs, axes = layout.compute["layers"], jax.tree.map(lambda _: frozenset(AXES[:2]), layout.shapes["layers"])

    def passes(weights: Any, x: jax.Array, dy: jax.Array) -> Any:
        weights = jax.tree.map(lambda w: w[0], as_varying(weights, specs, axes))
        x, dy = (lax.pcast(each, AXES[:2], to="varying") for each in (x, dy))
        y, stashed, _ = split.forward(weights, x, again)
        # The barrier stands for the stash: the backward pass sees nothing else of the forward pass.
        found = y, split.backward(weights, again, [lax.optimization_barrier(leaf) for leaf in stashed], dy)
        return jax.tree.map(lambda each: each[None], found)

    weights = jax.tree.map(lambda w: jax.ShapeDtypeStruct((1, *w.shape[1:]), dtype), layout.shapes["layers"])
    x = jax.ShapeDtypeStruct((examples, config.model.seq_len, config.model.hidden_size), dtype)
    mapped = jax.shard_map(passes, mesh=mesh, in_specs=(specs, P(), P()), out_specs=P(AXES))
    costs = jax.jit(mapped).lower(weights, x, x).compile().cost_analysis()
    if costs is None:
        raise DeviceError(f"{topology}: XLA counts no costs of programs for it. Name a TPU, as tpu:v5e:1x1.")
    return {"flops": costs["flops"], "bytes": costs["bytes accessed"]}


def cases(hiddens: Sequence[int], seeds: int, steps: int) -> Iterator[StashCase]:
    """The training runs of the study, by seed."""
    for seed in range(seeds):
        for hidden in hiddens:
            for stash_dtype, microbatches in VARIANTS:
                yield StashCase(hidden, stash_dtype, microbatches, seed, steps)
