"""Logits of texts that are read token by token, against those of whole texts on one device."""

import jax
import numpy as np
import pytest

from fiddlex.cluster.mesh import make_mesh
from fiddlex.config import Config
from fiddlex.config.overrides import replaced
from fiddlex.errors import ConfigError
from fiddlex.train.inference.decoding import Decoding, make_decoding
from fiddlex.train.run.transfer.weights import whole
from fiddlex.train.step.program import Program
from tests import reference, reference_llama

LENGTHS = (5, 16, 1, 9)  # of prompts, in tokens
NUM_NEW = 7

LLAMA = {"model.family": "llama", "model.ffn_size": 48, "model.rope_base": 100.0, "model.num_heads": 4}
CHUNKS = {"pipeline.schedule": "interleaved_1f1b", "pipeline.num_chunks": 2}
PLAIN = {"pipeline.schedule": "1f1b", "pipeline.num_chunks": 1}
GPT_LAYOUTS = {
    "2x2x2": CHUNKS,
    "1x1x1": PLAIN,
    "1x3x1": PLAIN | {"pipeline.layers_per_stage": "1,2,1", "pipeline.num_microbatches": 4},
    "1x2x2": CHUNKS | {"mesh.sequence_parallel": True},
    "4x1x2": PLAIN | {"optimizer.zero1": True},
}
LLAMA_LAYOUTS = {
    "2x2x2": CHUNKS | {"model.num_kv_heads": 1, "model.qk_norm": True, "model.tied_embeddings": True},
    "1x2x4": PLAIN | {"model.num_kv_heads": 2, "model.head_dim": 10, "mesh.sequence_parallel": True},
    "1x1x1": PLAIN | {"model.num_kv_heads": 4},
}
CASES = [
    *(pytest.param({}, mesh, fields, id=f"gpt-{mesh}") for mesh, fields in GPT_LAYOUTS.items()),
    *(pytest.param(LLAMA, mesh, fields, id=f"llama-{mesh}") for mesh, fields in LLAMA_LAYOUTS.items()),
]
IN_DEFAULT_TIER = ("gpt-2x2x2", "llama-1x2x4")


def make_config(base: Config, mesh: str, **fields: object) -> Config:
    data, pipe, tensor = map(int, mesh.split("x"))
    sizes = {"mesh.data": data, "mesh.pipe": pipe, "mesh.tensor": tensor, "model.num_layers": 4, "model.seq_len": 24}
    return replaced(base, sizes | {"pipeline.num_microbatches": 2} | fields).validate()


def load(config: Config) -> tuple[Program, Decoding, object]:
    program = Program(config, make_mesh(config.mesh))
    return program, make_decoding(program), program.init_state().weights


@pytest.mark.parametrize(
    ("model", "mesh", "fields"),
    [
        case if case.id in IN_DEFAULT_TIER else pytest.param(*case.values, id=case.id, marks=pytest.mark.long)
        for case in CASES
    ],
)
def test_logits_are_those_of_whole_texts(tiny_config: Config, model: dict, mesh: str, fields: dict) -> None:
    config = make_config(tiny_config, mesh, **model, **fields)
    program, decoding, master = load(config)
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 257, length + NUM_NEW).tolist() for length in LENGTHS]
    plain = reference.unstack(whole(master, program.model, program.layout))
    logits_fn = reference_llama.logits_fn if model else reference.logits_fn
    padded = np.asarray([text + [0] * (24 - len(text)) for text in texts])
    expected = np.asarray(logits_fn(plain, padded, None, config))

    weights = decoding.weights(master)
    prompts = [text[:length] for text, length in zip(texts, LENGTHS, strict=True)]
    state, logits = decoding.prefill(weights, prompts, NUM_NEW)
    for number in range(NUM_NEW + 1):
        for row, length in enumerate(LENGTHS):
            wanted = expected[row, length - 1 + number]
            np.testing.assert_allclose(logits[row, :257], wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())
        assert np.all(np.asarray(logits[:, 257:]) == np.finfo(np.float32).min)
        if number < NUM_NEW:
            tokens = [text[length + number] for text, length in zip(texts, LENGTHS, strict=True)]
            state, logits = decoding.step(weights, state, np.asarray(tokens, np.int32))


def test_a_step_is_compiled_once_and_writes_into_the_cache_that_it_is_given(tiny_config: Config) -> None:
    config = make_config(tiny_config, "1x2x2", **CHUNKS)
    _, decoding, master = load(config)
    weights = decoding.weights(master)
    state, _ = decoding.prefill(weights, [[1, 2, 3]], 4)
    assert {leaf.shape for leaf in state.cache} == {(4, 1, 64, 4, 8)}
    assert {leaf.sharding.shard_shape(leaf.shape) for leaf in state.cache} == {(2, 1, 64, 2, 8)}
    compiled = []
    listen = lambda event, duration, **_: compiled.append(event) if "backend_compile" in event else None  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for _ in range(3):
            before = [shard.data.unsafe_buffer_pointer() for leaf in state.cache for shard in leaf.addressable_shards]
            old, (state, _) = state, decoding.step(weights, state, np.asarray([5], np.int32))
            after = [shard.data.unsafe_buffer_pointer() for leaf in state.cache for shard in leaf.addressable_shards]
            assert all(leaf.is_deleted() for leaf in old.cache)
            assert set(before) == set(after)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert len(compiled) == 1


def test_a_model_without_next_tokens_is_told(tiny_config: Config) -> None:
    config = replaced(tiny_config, {"model.family": "bert", "model.objective": "mlm"}).validate()
    with pytest.raises(ConfigError, match=r"model\.objective=mlm cannot go on with a text"):
        make_decoding(Program(config, make_mesh(config.mesh)))
