"""The pipeline of the benchmarks that `jax.grad` makes trains as the executor does, so that the two can be compared."""

import chex
import jax
import numpy as np
import pytest

from experiments.benchmarks.programs import make_program
from experiments.benchmarks.scan_pipeline import make_scan_gradients
from experiments.benchmarks.sizes import with_microbatches
from fiddlex.config import Config
from fiddlex.parallel.sharding import named
from fiddlex.train.step.flushed import make_gradients


@pytest.mark.parametrize("checkpoint_stage", [False, pytest.param(True, marks=pytest.mark.long)])
def test_loss_and_gradients_are_the_executors(checkpoint_stage: bool, tiny_config: Config) -> None:
    tiny_config.model.num_layers, tiny_config.mesh.pipe = 8, 4
    program = make_program(with_microbatches(tiny_config, 6, microbatch_size=2))
    model, layout, mesh = program.model, program.layout, program.mesh
    init = jax.jit(lambda key: model.init(key, layout.placement.layers), out_shardings=named(mesh, layout.compute))
    weights = init(jax.random.key(1))
    rng = np.random.default_rng(0)
    batch = {name: rng.integers(0, 257, (12, 16), np.int32) for name in ("tokens", "targets")}
    batch["weights"] = rng.random((12, 16), np.float32)
    expected = jax.jit(make_gradients(model, program.config, mesh, layout))(weights, batch, np.int32(0), np.float32(1))
    gradients = make_scan_gradients(model, program.config, mesh, layout, checkpoint_stage=checkpoint_stage)
    loss, grads = jax.jit(gradients)(weights, batch)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-5)
    chex.assert_trees_all_equal_shapes(grads, expected[1])
    for leaf, wanted in zip(jax.tree.leaves(grads), jax.tree.leaves(expected[1]), strict=True):
        assert np.linalg.norm(leaf - wanted) < 1e-5 * np.linalg.norm(wanted)
