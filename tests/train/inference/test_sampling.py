import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from fiddlex.errors import ConfigError
from fiddlex.train.inference.sampling import SamplingConfig, sample


@hypothesis.settings(max_examples=25)
@hypothesis.given(
    seed=st.integers(0, 1000),
    top_k=st.sampled_from([0, 1, 3, 50]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
)
def test_only_allowed_tokens_are_drawn(seed: int, top_k: int, top_p: float, temperature: float) -> None:
    logits = np.random.default_rng(seed).normal(size=12).astype(np.float32) * 3
    config = SamplingConfig(temperature, top_k, top_p, seed)
    drawn = np.asarray(sample(jnp.tile(np.append(logits, 99), (200, 1)), 0, config, vocab_size=12))
    order = np.argsort(-logits)[: top_k or None]
    probabilities = np.exp(logits[order] / temperature - (logits[order] / temperature).max())
    probabilities /= probabilities.sum()
    size = max(1, int(np.searchsorted(np.cumsum(probabilities), top_p - 1e-6)) + 1)
    assert set(drawn) <= set(order[:size])
    if size > 1 and probabilities[1] > 0.1:
        assert len(set(drawn)) > 1


@pytest.mark.parametrize("temperature", [0.0, 1e-320, 1e-30])
def test_at_a_low_temperature_the_likeliest_is_taken(temperature: float) -> None:
    logits = jnp.asarray([[0.0, 2.0, 1.0, 9.0], [3.0, 2.0, 1.0, 9.0]])
    for top_p in (1.0, 0.9, 1e-50):
        assert sample(logits, 0, SamplingConfig(temperature, top_p=top_p), vocab_size=3).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("top_k", "top_p", "expected"),
    [(0, 1.0, (0.5, 0.3, 0.2)), (3, 1.0, (0.5, 0.3, 0.2)), (2, 1.0, (0.625, 0.375, 0)), (0, 0.7, (0.625, 0.375, 0))],
)
def test_frequencies_follow_the_distribution(top_k: int, top_p: float, expected: tuple[float, ...]) -> None:
    logits = jnp.log(jnp.asarray([0.5, 0.3, 0.2]))
    drawn = sample(jnp.tile(logits, (20_000, 1)), 0, SamplingConfig(top_k=top_k, top_p=top_p), vocab_size=3)
    frequencies = np.bincount(drawn, minlength=3) / 20_000
    np.testing.assert_allclose(frequencies, expected, atol=0.015)
    assert [bool(frequency) for frequency in frequencies] == [bool(each) for each in expected]


def test_a_row_draws_the_same_in_any_batch() -> None:
    logits, config = jnp.zeros((64, 1000)), SamplingConfig(seed=3)
    drawn = sample(logits, 5, config, vocab_size=1000)
    assert len(set(drawn.tolist())) > 50
    np.testing.assert_array_equal(sample(logits[:9], 5, config, vocab_size=1000, first_row=40), drawn[40:49])
    for other in (sample(logits, 6, config, vocab_size=1000), sample(logits, 5, SamplingConfig(), vocab_size=1000)):
        assert np.mean(other == drawn) < 0.1


@pytest.mark.parametrize(("name", "value"), [("top_k", -1), ("top_k", 2**31), ("seed", -1), ("seed", 2**31)])
def test_whole_numbers_out_of_range(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}={value} must be at least 0 and below 2147483648"):
        SamplingConfig(**{name: value}).validate()
    SamplingConfig(**{name: 2**31 - 1}).validate()


def test_logits_that_are_not_finite_draw_nothing() -> None:
    logits = jnp.asarray([[0.0, jnp.nan, 1.0], [0.0, 1.0, 2.0], [0.0, jnp.inf, 1.0]])
    for config in (SamplingConfig(temperature=0.0), SamplingConfig(), SamplingConfig(top_k=2)):
        drawn = sample(logits, 0, config, vocab_size=3).tolist()
        assert (drawn[0], drawn[2]) == (-1, -1)
        assert drawn[1] in (0, 1, 2)


def test_cuts_change_no_draw_that_they_allow() -> None:
    logits = jnp.tile(jnp.linspace(0, 3, 40), (500, 1))
    free, cut = (sample(logits, 0, SamplingConfig(top_k=top_k), vocab_size=40) for top_k in (0, 39))
    assert 0 < jnp.sum(free == 0) < 100  # the one token that is cut
    assert jnp.all((free == cut) | (free == 0))
