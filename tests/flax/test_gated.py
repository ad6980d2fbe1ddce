"""The family of tests/models/test_new_family.py as three Flax modules: what a user writes, and that it is the same."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fiddlex.config import Config
from fiddlex.config.families import FAMILIES
from fiddlex.costs.sizes import model_flops, num_parameters
from fiddlex.flax import family
from fiddlex.models.registry import make_model
from tests import reference
from tests.flax.modules import plain_loss
from tests.models.test_new_family import GATED, reference_loss


class Embed(nnx.Module):
    def __init__(self, config, *, rngs):
        self.tokens = nnx.Embed(config.vocab_size, config.hidden_size, dtype=config.dtype, rngs=rngs)
        self.positions = nnx.Embed(config.seq_len, config.hidden_size, dtype=config.dtype, rngs=rngs)

    def __call__(self, tokens):
        return self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[-1]))


class Block(nnx.Module):
    def __init__(self, config, *, rngs):
        hidden, units = config.hidden_size, config.mlp_size
        self.attention_norm, self.mlp_norm = (nnx.RMSNorm(hidden, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(config.num_heads, hidden, use_bias=False, decode=False, rngs=rngs)
        self.up = nnx.Linear(hidden, 2 * units, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(units, hidden, use_bias=False, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(self, x):
        x += self.dropout(self.attention(self.attention_norm(x), mask=nnx.make_causal_mask(x[..., 0])))
        gate, value = jnp.split(self.up(self.mlp_norm(x)), 2, axis=-1)
        return x + self.dropout(self.down(nnx.silu(gate) * value))


class Head(nnx.Module):
    def __init__(self, config, *, rngs):
        self.norm = nnx.RMSNorm(config.hidden_size, rngs=rngs)
        self.output = nnx.Linear(config.hidden_size, config.vocab_size, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.output(self.norm(x))


FLAX = family(embed=Embed, block=Block, head=Head)


def test_three_modules_say_what_a_description_and_a_class_do(
    tiny_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, "gated", GATED)
    monkeypatch.setitem(FAMILIES, "flax", FLAX)
    tiny_config.model.family = "gated"
    of_flax = copy.deepcopy(tiny_config)
    of_flax.model.family = "flax"
    assert num_parameters(of_flax) == num_parameters(tiny_config)
    assert model_flops(of_flax) == model_flops(tiny_config)

    weights = reference.unstack(make_model(of_flax).init(jax.random.key(0), range(of_flax.model.num_layers)))
    tokens, targets = np.random.default_rng(0).integers(0, 257, (2, 2, 16)).astype(np.int32)
    batch, step = {"tokens": tokens, "targets": targets}, jnp.int32(0)
    found = plain_loss(Embed, Block, Head)(weights | {"head": weights["head"] | {"tokens": {}}}, batch, step, of_flax)
    np.testing.assert_allclose(found, reference_loss(described(weights, of_flax), batch, step, of_flax), rtol=1e-5)


def described(weights, config):
    """The weights of the modules under the names and in the shapes of the description."""

    def layer(w):
        attention = w["attention"]
        qkv = jnp.stack([attention[name]["kernel"] for name in ("query", "key", "value")], axis=1)
        up = w["up"]["kernel"].reshape(config.model.hidden_size, 2, -1)
        mlp = {"up": {"kernel": up}, "down": w["down"]}
        attention = {"qkv": {"kernel": qkv}, "out": attention["out"]}
        return {"attention_norm": w["attention_norm"], "mlp_norm": w["mlp_norm"], "attention": attention, "mlp": mlp}

    embedding = {name: table["embedding"] for name, table in weights["embedding"].items()}
    head = {"norm": weights["head"]["norm"], "output": {"kernel": weights["head"]["output"]["kernel"].T}}
    return {"embedding": embedding, "layers": list(map(layer, weights["layers"])), "head": head}
