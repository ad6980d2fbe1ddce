"""The gradient of one batch on two layouts, against `jax.grad` of the plain model: what an optimizer is given.

`test_layouts` trains on many more, with optimizers.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fiddlex.cluster.mesh import make_mesh
from fiddlex.config import Config
from fiddlex.data import Loader
from fiddlex.train.run.transfer.weights import whole
from fiddlex.train.step.program import Program
from tests import reference, reference_bert
from tests.train.bert import of_task, random_dataset

TOLERANCE = 1e-5  # relative, float32
STEP = 3  # whose dropout masks are drawn


def bert_on_replicas_that_share_sequences(config: Config) -> None:
    of_task(config, "mlm_nsp")
    config.mesh.data = config.mesh.tensor = config.pipeline.num_microbatches = 2
    config.mesh.sequence_parallel = True


def gpt_in_uneven_stages_with_split_backwards(config: Config) -> None:
    config.model.num_layers, config.mesh.pipe, config.pipeline.layers_per_stage = 3, 2, "1,2"
    config.pipeline.schedule, config.pipeline.num_microbatches, config.pipeline.recompute = "zb_h1", 4, "full"


LAYOUTS = {
    "BERT": bert_on_replicas_that_share_sequences,
    "GPT": gpt_in_uneven_stages_with_split_backwards,
}


@pytest.mark.parametrize("model", LAYOUTS)
def test_gradients_are_those_of_the_plain_model(model: str, tiny_config: Config) -> None:
    config = tiny_config
    config.model.dropout = 0.1
    LAYOUTS[model](config)
    program = Program(config.validate(), make_mesh(config.mesh))
    state, batch = program.init_state()._replace(step=jnp.int32(STEP)), a_batch(config)
    loss, grads, _ = jax.jit(program.source.gradients)(state, batch)

    loss_fn = reference_bert.loss_fn if config.model.family == "bert" else reference.gpt_loss_fn
    weights = reference.unstack(whole(state.weights, program.model, program.layout))
    plain = jax.jit(jax.value_and_grad(lambda weights: loss_fn(weights, batch, jnp.int32(STEP), config)))
    expected_loss, expected = plain(weights)
    np.testing.assert_allclose(loss, expected_loss, rtol=TOLERANCE)
    np.testing.assert_allclose(optax.tree.norm(grads), optax.tree.norm(expected), rtol=TOLERANCE)  # padding included
    found = reference.unstack(whole(grads, program.model, program.layout))
    chex.assert_trees_all_equal_structs(found, expected)
    for (path, wanted), leaf in zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(found), strict=True):
        difference = np.linalg.norm(leaf - wanted) / np.linalg.norm(wanted)
        assert difference < TOLERANCE, f"{jax.tree_util.keystr(path)}: relative difference {difference:.2e}"


def a_batch(config: Config) -> dict[str, np.ndarray]:
    """Random tokens with unequal weights, so that one microbatch or replica has more to be scored than another."""
    size, length, vocab_size = config.data.global_batch_size, config.model.seq_len, config.model.vocab_size
    if config.model.family == "bert":
        examples = random_dataset(config).train
        return Loader(examples, global_batch_size=size, seed=0, vocab_size=vocab_size).batch(0)
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(0, vocab_size, (2, size, length)).astype(np.int32)
    weights = rng.random((size, length)) * (rng.random((size, 1)) < 0.8)
    return {"tokens": tokens, "targets": targets, "weights": weights.astype(np.float32)}
