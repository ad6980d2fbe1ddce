"""The vocabulary-parallel embedding and loss against plain ones, for any shards, padding and cut of the sequence."""

import functools
import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import P

from fiddlex.cluster.mesh import make_mesh
from fiddlex.config import MeshConfig
from fiddlex.models.sharded_vocabulary import cross_entropy, embed_tokens, local_logits
from fiddlex.parallel.collectives import enter_tensor_parallel


@hypothesis.settings(max_examples=12, deadline=None)
@hypothesis.given(
    vocab_size=st.integers(3, 40),
    shards=st.sampled_from([(1, 1), (1, 2), (2, 2), (1, 8), (4, 2)]),
    sequence_parallel=st.booleans(),
    scale=st.sampled_from([0.1, 1.0, 30.0]),
    seed=st.integers(0, 2**31),
)
@hypothesis.example(vocab_size=5, shards=(2, 2), sequence_parallel=True, scale=0.1, seed=0)  # padding would count
def test_loss_and_gradients_equal_plain_ones(
    vocab_size: int, shards: tuple[int, int], sequence_parallel: bool, scale: float, seed: int
) -> None:
    count = shards[0] * shards[1]
    rows = -(-vocab_size // count) * count
    rng = np.random.default_rng(seed)
    table = np.zeros((rows, 6), np.float32)
    table[:vocab_size] = scale * rng.normal(size=(vocab_size, 6))
    tokens, targets = rng.integers(0, vocab_size, (2, 3, 8)).astype(np.int32)
    weights = rng.random((3, 8)).astype(np.float32)

    loss, grads = parallel_loss(shards, vocab_size, sequence_parallel)(table, tokens, targets, weights)
    expected, expected_grads = jax.jit(jax.value_and_grad(plain_loss))(table[:vocab_size], tokens, targets, weights)
    np.testing.assert_allclose(loss, expected, rtol=1e-5, atol=1e-5)
    scale_of_grads = np.abs(expected_grads).max()
    np.testing.assert_allclose(grads[:vocab_size], expected_grads, rtol=1e-5, atol=1e-5 * scale_of_grads)
    np.testing.assert_array_equal(grads[vocab_size:], 0)


def plain_loss(table: jax.Array, tokens: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
    logits = jnp.tanh(table[tokens]) @ table.T
    return -jnp.sum(jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0] * weights)


@functools.cache
def parallel_loss(shards: tuple[int, int], vocab_size: int, sequence_parallel: bool):
    pipe, tensor = shards
    config = MeshConfig(pipe=pipe, tensor=tensor)

    def loss(table, tokens, targets, weights):
        x = jnp.tanh(embed_tokens(table, tokens, sequence_parallel=sequence_parallel))
        x = enter_tensor_parallel(x, sequence_parallel=sequence_parallel)
        return jnp.sum(cross_entropy(local_logits(x, table, vocab_size=vocab_size), targets) * weights)

    spec = P(("pipe", "tensor"))
    return jax.jit(
        jax.shard_map(
            jax.value_and_grad(loss),
            mesh=make_mesh(config),
            in_specs=(spec, P(), P(), P()),
            out_specs=(P(), spec),
        )
    )


def test_no_device_holds_the_logits_of_the_whole_vocabulary() -> None:
    text = (
        parallel_loss((2, 2), 4096, False)
        .lower(jnp.zeros((4096, 6)), *[jnp.zeros((3, 8), jnp.int32)] * 2, jnp.zeros((3, 8)))
        .compile()
        .as_text()
    )
    assert "[3,8,1024]" in text
    assert not re.search(r"\[[\d,]*\b4096\b[\d,]*\]", text)  # no shape with the whole vocabulary in it
