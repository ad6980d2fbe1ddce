import pathlib

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from hypothesis import strategies as st

from fiddlex.data import ByteTokenizer, JsonTokenizer
from fiddlex.errors import ConfigError
from fiddlex.train.inference.sampling import SamplingConfig, generate, generate_text, sample


@hypothesis.settings(max_examples=25)
@hypothesis.given(
    seed=st.integers(0, 1000),
    top_k=st.sampled_from([0, 1, 3, 50]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
)
def test_only_allowed_tokens_are_drawn(seed: int, top_k: int, top_p: float, temperature: float) -> None:
    logits = np.random.default_rng(seed).normal(size=12).astype(np.float32) * 3
    drawn = np.asarray(sample(jax.random.key(seed), jnp.tile(logits, (200, 1)), temperature, top_k, top_p))
    order = np.argsort(-logits)[: top_k or None]
    probabilities = np.exp(logits[order] / temperature - (logits[order] / temperature).max())
    probabilities /= probabilities.sum()
    size = max(1, int(np.searchsorted(np.cumsum(probabilities), top_p - 1e-6)) + 1)
    assert set(drawn) <= set(order[:size])
    if size > 1 and probabilities[1] > 0.1:
        assert len(set(drawn)) > 1


def test_temperature_zero_takes_the_likeliest() -> None:
    logits = jnp.asarray([[0.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    assert sample(jax.random.key(0), logits, 0.0, 0, 1.0).tolist() == [1, 0]


def test_frequencies_follow_the_distribution() -> None:
    logits = jnp.log(jnp.asarray([0.5, 0.3, 0.2]))
    drawn = sample(jax.random.key(0), jnp.tile(logits, (20_000, 1)), 1.0, 0, 1.0)
    np.testing.assert_allclose(np.bincount(drawn, minlength=3) / 20_000, [0.5, 0.3, 0.2], atol=0.015)


def test_the_window_slides() -> None:
    seen = []

    def next_logits(tokens: np.ndarray, positions: np.ndarray) -> jax.Array:
        seen.append((tokens[0].tolist(), int(positions[0])))
        return jax.nn.one_hot(jnp.asarray([len(seen)]), 16)

    tokens = list(generate(next_logits, [14, 15], 4, seq_len=3, vocab_size=16, config=SamplingConfig(temperature=0.0)))
    assert tokens == [1, 2, 3, 4]
    assert seen == [([14, 15, 0], 1), ([14, 15, 1], 2), ([15, 1, 2], 2), ([1, 2, 3], 2)]
    with pytest.raises(ConfigError, match="prompt is empty"):
        next(generate(next_logits, [], 1, seq_len=3, vocab_size=16, config=SamplingConfig()))


def test_text_comes_in_whole_characters_and_ends_with_the_document() -> None:
    script = iter("aé€".encode() + b"\xff!\0never")

    def next_logits(tokens: np.ndarray, positions: np.ndarray) -> jax.Array:
        return jax.nn.one_hot(jnp.asarray([next(script)]), 300) * 100  # rows beyond the tokenizer's are never drawn

    pieces = generate_text(next_logits, ByteTokenizer(), "", 50, seq_len=8, config=SamplingConfig())
    assert [piece for piece in pieces if piece] == ["a", "é", "€", "\ufffd!"]


@pytest.mark.parametrize(("name", "value"), [("top_k", -1), ("top_k", 2**31), ("seed", -1), ("seed", 2**31)])
def test_whole_numbers_out_of_range(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}={value} must be at least 0 and below 2147483648"):
        SamplingConfig(**{name: value}).validate()
    SamplingConfig(**{name: 2**31 - 1}).validate()


def test_the_first_piece_continues_the_prompt(tmp_path: pathlib.Path) -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"fold": 0, "bind": 1}, unk_token="fold"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))  # puts a space before each word but the first of a text

    def next_logits(tokens: np.ndarray, positions: np.ndarray) -> jax.Array:
        return jnp.asarray([[0.0, 100.0]])

    pieces = generate_text(
        next_logits, JsonTokenizer(tmp_path / "tokenizer.json"), "fold", 2, seq_len=8, config=SamplingConfig()
    )
    assert list(pieces) == [" bind", " bind"]
