"""A GPT written as Flax modules that know nothing of pipelines, trained as configs/gpt_tiny.py is.

Eight devices, two along `data` and four along `pipe`; on a CPU fiddlex makes them up (docs/flax.md).

    python experiments/train.py --config=experiments/flax_tiny.py --workdir=/tmp/flax_tiny
"""

import jax
import jax.numpy as jnp
from flax import nnx

from fiddlex.config import Config, MeshConfig, ModelConfig
from fiddlex.config.families import FAMILIES
from fiddlex.config.files import load_config
from fiddlex.flax import family


class Embed(nnx.Module):
    """Tokens and learned positions."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(config.vocab_size, config.hidden_size, dtype=config.dtype, rngs=rngs)
        self.positions = nnx.Embed(config.seq_len, config.hidden_size, dtype=config.dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[-1]))


class Block(nnx.Module):
    """LayerNorm before attention and before the MLP."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        hidden, units = config.hidden_size, config.mlp_size
        self.attention_norm, self.mlp_norm = nnx.LayerNorm(hidden, rngs=rngs), nnx.LayerNorm(hidden, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(config.num_heads, hidden, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(hidden, units, rngs=rngs), nnx.Linear(units, hidden, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.dropout(self.attention(self.attention_norm(x), mask=mask))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.mlp_norm(x)))))


class Head(nnx.Module):
    """Scores with the embedding's table."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(config.hidden_size, rngs=rngs)

    def __call__(self, x: jax.Array, embed: Embed) -> jax.Array:
        return embed.tokens.attend(self.norm(x))


FAMILIES["flax_tiny"] = family(embed=Embed, block=Block, head=Head)


def get_config() -> Config:
    config = load_config("gpt_tiny")
    config.model.family = "flax_tiny"
    config.mesh = MeshConfig(data=2, pipe=4)
    config.pipeline.schedule, config.pipeline.num_chunks = "1f1b", 1
    config.train.sample_tokens = 0
    return config
