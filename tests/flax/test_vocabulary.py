"""Embedding and head of Flax modules, of which the ranks of pipe × tensor share the vocabulary."""

import copy
import dataclasses
import re
from typing import Any

import jax
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

V, PADDED, H = 257, 260, 32


@pytest.fixture
def spread(config: Config) -> Config:
    config.mesh.data, config.mesh.pipe, config.mesh.tensor = 1, 2, 2
    return config


def test_a_rank_has_its_rows_alone(spread: Config) -> None:
    assert spread.padded_vocab_size == PADDED
    spread.model.family = "linen"
    weights = Trainer(spread).state.weights
    table, kernel = weights["embedding"]["Embed_0"]["embedding"], weights["head"]["output"]["kernel"]
    assert (table.shape, kernel.shape) == ((PADDED, H), (H, PADDED))
    assert {shard.data.shape for shard in table.addressable_shards} == {(PADDED // 4, H)}
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(H, PADDED // 4)}


@pytest.mark.parametrize("name", ["nnx", "linen"])
def test_no_device_has_a_whole_table_or_gradient_or_all_logits(name: str, spread: Config) -> None:
    spread.model.family = name
    program = make_program(spread)
    text = program.step.lower(program.abstract_state, program.source.abstract_inputs).compile().as_text()
    assert f"[{PADDED // 4},{H}]" in text or f"[{H},{PADDED // 4}]" in text
    assert not re.search(rf"\[{PADDED},{H}\]|\[{H},{PADDED}\]|{PADDED}\]", text)


def test_its_work_is_that_of_the_same_gpt(spread: Config) -> None:
    plain = copy.deepcopy(spread)
    plain.model.family = "gpt"
    assert edge_work(spread, shards=4) == edge_work(plain, shards=4)


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


@pytest.mark.parametrize(("embed", "head"), [(fixed(modules.Embed), modules.Head), (Twice, Output)])
def test_a_vocabulary_that_modules_hide_stays_whole(
    embed: Any, head: Any, spread: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(FAMILIES, "nnx", family(embed=embed, block=modules.Block, head=head))
    assert network_of(spread).vocab_shards(4) == 1
    alone = copy.deepcopy(spread)
    alone.mesh.pipe = alone.mesh.tensor = 1
    alone.pipeline.schedule = "gpipe"
    expected = [record["loss"] for record in Trainer(alone).steps(2)]
    assert "all of embedding and head" not in caplog.text
    assert [record["loss"] for record in Trainer(spread).steps(2)] == pytest.approx(expected, rel=1e-5)
    assert (
        "model.family=nnx with mesh.pipe=2 and mesh.tensor=2: each device has all of embedding and head" in caplog.text
    )
