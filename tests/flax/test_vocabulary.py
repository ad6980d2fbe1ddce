"""Embedding and head of Flax modules, of which the ranks of pipe × tensor share the vocabulary."""

import copy
import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from experiments.benchmarks.programs import make_program
from fiddlex.config import Config
from fiddlex.config.families import FAMILIES
from fiddlex.costs.work import edge_work
from fiddlex.flax import family
from fiddlex.models.registry import network_of
from fiddlex.train.trainer import Trainer
from tests.flax import modules

V, H = 264, 32


@pytest.fixture
def spread(config: Config) -> Config:
    config.mesh.data, config.mesh.pipe, config.mesh.tensor = 1, 2, 2
    config.model.vocab_size = V
    return config


def test_a_rank_has_its_rows_alone(spread: Config) -> None:
    spread.model.family = "linen"
    weights = Trainer(spread).state.weights
    table, kernel = weights["embedding"]["Embed_0"]["embedding"], weights["head"]["output"]["kernel"]
    assert (table.shape, kernel.shape) == ((V, H), (H, V))
    assert {shard.data.shape for shard in table.addressable_shards} == {(V // 4, H)}
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(H, V // 4)}


@pytest.mark.parametrize("name", ["nnx", "linen"])
def test_no_device_has_a_whole_table_or_gradient_or_all_logits(name: str, spread: Config) -> None:
    spread.model.family = name
    program = make_program(spread)
    text = program.step.lower(program.abstract_state, program.source.abstract_inputs).compile().as_text()
    assert f"[{V // 4},{H}]" in text or f"[{H},{V // 4}]" in text
    assert not re.search(rf"\[{V},{H}\]|\[{H},{V}\]|{V}\]", text)


def test_its_work_is_that_of_the_same_gpt(spread: Config) -> None:
    plain = copy.deepcopy(spread)
    plain.model.family = "gpt"
    assert edge_work(spread, shards=4) == edge_work(plain, shards=4)
    assert network_of(spread).vocab_shards(5) == 1  # which does not divide the vocabulary
    assert network_of(plain).vocab_shards(5) == 5


def fixed(kind: Any) -> Any:
    """Modules that do not take the size of the vocabulary from their config."""
    return lambda config, rngs: kind(dataclasses.replace(config, vocab_size=V), rngs=rngs)


class Twice(nnx.Module):
    """Two rows for each token, of which the second is not used."""

    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        double = dataclasses.replace(config, vocab_size=2 * config.vocab_size)
        self.both = modules.Embed(double, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.both(tokens)


class Output(nnx.Module):
    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        self.output = nnx.Linear(config.hidden_size, config.vocab_size, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.output(x)


class Prior(Output):
    """Adds an array that has the size of one vocabulary."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(x) + jnp.linspace(0.0, 1.0, V)


class Cosine(Output):
    """Scores with rows of length 1, which rows of zeros do not have, and standardises the logits of a position."""

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.output.kernel.get_value()
        return jax.nn.standardize(5 * x @ (kernel / jnp.linalg.norm(kernel, axis=0)), axis=-1)


class Pairs(modules.Embed):
    """Adds rows that are numbered by tokens in twos, modulo the vocabulary, and some that are counted from its end."""

    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.size, self.pairs = config.vocab_size, nnx.Embed(config.vocab_size, config.hidden_size, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        before = jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
        pairs = self.pairs((31 * tokens + 7 * before) % self.size)
        return super().__call__(tokens) + pairs + self.pairs.embedding.get_value()[tokens - 100]


@pytest.mark.parametrize(
    ("embed", "head", "size", "why"),
    [
        pytest.param(
            modules.Embed, modules.Head, 257, "has no equal parts for them; model.vocab_size=260 has", id="257"
        ),
        pytest.param(Pairs, Cosine, 257, "has no equal parts for them; model.vocab_size=260 has", id="counted, 257"),
        pytest.param(Pairs, Cosine, V, "", id="counted", marks=pytest.mark.long),
        *(
            pytest.param(embed, head, V, "has a dimension that is config.vocab_size", id=name, marks=pytest.mark.long)
            for name, embed, head in [
                ("fixed", fixed(modules.Embed), modules.Head),
                ("twice", Twice, Output),
                ("one size", modules.Embed, Prior),
            ]
        ),
    ],
)
def test_a_vocabulary_is_shared_or_whole_and_losses_are_those_of_one_device(
    embed: Any,
    head: Any,
    size: int,
    why: str,
    spread: Config,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setitem(FAMILIES, "nnx", family(embed=embed, block=modules.Block, head=head))
    spread.model.vocab_size = size
    assert network_of(spread).vocab_shards(4) == (1 if why else 4)
    alone = copy.deepcopy(spread)
    alone.mesh.pipe = alone.mesh.tensor = 1
    alone.pipeline.schedule = "gpipe"
    expected = [record["loss"] for record in Trainer(alone).steps(3)]
    assert "all of embedding and head" not in caplog.text
    assert [record["loss"] for record in Trainer(spread).steps(3)] == pytest.approx(expected, rel=1e-5)
    told = "model.family=nnx with mesh.pipe=2 and mesh.tensor=2: each device has all of embedding and head"
    assert (told in caplog.text) == bool(why)
    assert why in caplog.text
