"""Families made of blocks of published packages, as a user would write them, and the whole models of these packages.

The packages are no dependencies of fiddlex (docs/tests.md says how to install them), so that they are imported where a
module is made.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen, nnx

from fiddlex.config import ModelConfig
from fiddlex.config.families import Family
from fiddlex.flax import family
from tests.flax.modules import plain_loss

Tree = Any
Whole = Callable[[Tree, jax.Array, ModelConfig], jax.Array]


# transformers 4.57: GPT-2. The embedding's table scores, too.


def gpt2_config(config, **others):
    from transformers import GPT2Config

    sizes = {"n_embd": config.hidden_size, "n_head": config.num_heads, "n_inner": config.mlp_size}
    sizes |= {"n_positions": config.seq_len, "n_layer": config.num_layers, "vocab_size": config.vocab_size}
    return GPT2Config(**sizes, resid_pdrop=config.dropout, attn_pdrop=config.dropout, embd_pdrop=0.0, **others)


class Gpt2Embed(linen.Module):
    config: Any

    def setup(self):
        self.tokens = linen.Embed(self.config.vocab_size, self.config.hidden_size, dtype=self.config.dtype)
        self.positions = linen.Embed(self.config.seq_len, self.config.hidden_size, dtype=self.config.dtype)

    def __call__(self, tokens):
        return self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[-1]))


class Gpt2Block(linen.Module):
    config: Any

    @linen.compact
    def __call__(self, x, deterministic):
        from transformers.models.gpt2.modeling_flax_gpt2 import FlaxGPT2Block

        block = FlaxGPT2Block(gpt2_config(self.config), dtype=self.config.dtype, name="block")
        return block(x, deterministic=deterministic)[0]


class Gpt2Head(linen.Module):
    config: Any

    @linen.compact
    def __call__(self, x, embed):
        return embed.tokens.attend(linen.LayerNorm(1e-5, dtype=self.config.dtype, name="norm")(x))


def gpt2_whole(weights: Tree, tokens: jax.Array, config: ModelConfig) -> jax.Array:
    from transformers.models.gpt2.modeling_flax_gpt2 import FlaxGPT2LMHeadModule

    embed, layers = weights["embedding"], weights["layers"]
    blocks = {str(i): layer["block"] for i, layer in enumerate(layers)}
    body = {"wte": embed["tokens"], "wpe": embed["positions"], "h": blocks, "ln_f": weights["head"]["norm"]}
    params = {"transformer": body, "lm_head": {"kernel": embed["tokens"]["embedding"].T}}
    module = FlaxGPT2LMHeadModule(gpt2_config(config, tie_word_embeddings=False))
    return module.apply({"params": params}, tokens, jnp.ones_like(tokens), _positions(tokens)).logits


# transformers 4.57: BERT as a decoder, whose layers attend to earlier tokens alone.


def bert_config(config):
    from transformers import BertConfig

    return BertConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        intermediate_size=config.mlp_size,
        max_position_embeddings=config.seq_len,
        hidden_dropout_prob=config.dropout,
        attention_probs_dropout_prob=config.dropout,
        is_decoder=True,
        tie_word_embeddings=False,
    )


class BertEmbed(linen.Module):
    config: Any

    @linen.compact
    def __call__(self, tokens, deterministic):
        from transformers.models.bert.modeling_flax_bert import FlaxBertEmbeddings

        embeddings = FlaxBertEmbeddings(bert_config(self.config), dtype=self.config.dtype, name="embeddings")
        return embeddings(tokens, jnp.zeros_like(tokens), _positions(tokens), None, deterministic=deterministic)


class BertBlock(linen.Module):
    config: Any

    @linen.compact
    def __call__(self, x, deterministic):
        from transformers.models.bert.modeling_flax_bert import FlaxBertLayer

        layer = FlaxBertLayer(bert_config(self.config), dtype=self.config.dtype, name="layer")
        return layer(x, jnp.ones(x.shape[:2], jnp.int32), None, deterministic=deterministic)[0]


class BertHead(linen.Module):
    config: Any

    @linen.compact
    def __call__(self, x):
        from transformers.models.bert.modeling_flax_bert import FlaxBertLMPredictionHead

        return FlaxBertLMPredictionHead(bert_config(self.config), dtype=self.config.dtype, name="predictions")(x)


def bert_whole(weights: Tree, tokens: jax.Array, config: ModelConfig) -> jax.Array:
    from transformers.models.bert.modeling_flax_bert import FlaxBertForCausalLMModule

    layers = {str(i): layer["layer"] for i, layer in enumerate(weights["layers"])}
    params = {"bert": weights["embedding"] | {"encoder": {"layer": layers}}, "cls": weights["head"]}
    module = FlaxBertForCausalLMModule(bert_config(config))
    return module.apply({"params": params}, tokens, jnp.ones_like(tokens), _positions(tokens)).logits


# vidax: a Llama in Linen, with half as many heads of keys as of queries.


class VidaxEmbed(linen.Module):
    config: Any

    @linen.compact
    def __call__(self, tokens):
        return linen.Embed(self.config.vocab_size, self.config.hidden_size, dtype=self.config.dtype)(tokens)


class VidaxBlock(linen.Module):
    config: Any

    @linen.compact
    def __call__(self, x):
        from vidax.models.hunyuan_video.hunyuan_video import llama_text

        config, length = self.config, x.shape[1]
        cos, sin = llama_text._rope_cos_sin(length, config.hidden_size // config.num_heads, theta=1e4)
        heads = config.num_heads, config.num_heads // 2
        layer = llama_text.LlamaDecoderLayer(config.hidden_size, config.mlp_size, *heads, name="layer")
        return layer(x, cos, sin, jnp.tril(jnp.ones((1, 1, length, length), bool)))


class VidaxHead(linen.Module):
    config: Any

    @linen.compact
    def __call__(self, x):
        return linen.Dense(self.config.vocab_size, use_bias=False, name="output")(linen.RMSNorm(1e-5, name="norm")(x))


def vidax_whole(weights: Tree, tokens: jax.Array, config: ModelConfig) -> jax.Array:
    from vidax.models.hunyuan_video.hunyuan_video import llama_text

    params = {f"layers_{i}": layer["layer"] for i, layer in enumerate(weights["layers"])}
    params |= {"embed_tokens": weights["embedding"]["Embed_0"], "norm": weights["head"]["norm"]}
    sizes = config.vocab_size, config.hidden_size, config.mlp_size, config.num_layers, config.num_heads
    module = llama_text.LlamaTextModel(*sizes, config.num_heads // 2, rope_theta=1e4)
    return module.apply({"params": params}, tokens)[-1] @ weights["head"]["output"]["kernel"]


# dantinox: NNX, with rotary positions in an array that is no `nnx.Variable`. The embedding's table scores, too.


def dantinox_config(config):
    from dantinox.core.config import ModelConfig

    return ModelConfig(
        dim=config.hidden_size,
        n_heads=config.num_heads,
        num_blocks=config.num_layers,
        vocab_size=config.vocab_size,
        max_context=config.seq_len,
        expansion=config.mlp_size // config.hidden_size,
        dropout=config.dropout,
    )


class DantinoxEmbed(nnx.Module):
    def __init__(self, config, *, rngs):
        self.tokens = nnx.Embed(config.vocab_size, config.hidden_size, dtype=config.dtype, rngs=rngs)

    def __call__(self, tokens):
        return self.tokens(tokens)


class DantinoxBlock(nnx.Module):
    def __init__(self, config, *, rngs):
        from dantinox.core.block import Block

        self.block = Block(dantinox_config(config), rngs)

    def __call__(self, x, deterministic):
        return self.block(x, deterministic=deterministic)[0]


class DantinoxHead(nnx.Module):
    def __init__(self, config, *, rngs):
        from dantinox.core.block import RMSNorm

        self.norm = RMSNorm(config.hidden_size, rngs=rngs)

    def __call__(self, x, embed):
        return embed.tokens.attend(self.norm(x))


def dantinox_whole(weights: Tree, tokens: jax.Array, config: ModelConfig) -> jax.Array:
    from dantinox.core.model import Transformer

    blocks = dict(enumerate(layer["block"] for layer in weights["layers"]))
    state = {"embed": weights["embedding"]["tokens"], "blocks": blocks, "norm_f": weights["head"]["norm"]}
    module = Transformer(dantinox_config(config), rngs=nnx.Rngs(0))
    nnx.update(module, state)
    return module(tokens, deterministic=True).logits


# mamba2-jax: NNX, a state space in place of attention, in two pieces of the sequence.


def mamba2_config(config):
    from mamba2_jax import Mamba2Config

    return Mamba2Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        state_size=8,
        head_dim=8,
        chunk_size=config.seq_len // 2,
        tie_word_embeddings=False,
    )


class Mamba2Embed(nnx.Module):
    def __init__(self, config, *, rngs):
        self.table = nnx.Embed(config.vocab_size, config.hidden_size, dtype=config.dtype, rngs=rngs)

    def __call__(self, tokens):
        return self.table(tokens)


class Mamba2Block(nnx.Module):
    def __init__(self, config, *, rngs):
        from mamba2_jax import Mamba2Block

        self.block = Mamba2Block(mamba2_config(config), 0, rngs=rngs)

    def __call__(self, x):
        return self.block(x)[0]


class Mamba2Head(nnx.Module):
    def __init__(self, config, *, rngs):
        self.norm = nnx.RMSNorm(config.hidden_size, epsilon=1e-5, rngs=rngs)
        self.output = nnx.Linear(config.hidden_size, config.vocab_size, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.output(self.norm(x))


def mamba2_whole(weights: Tree, tokens: jax.Array, config: ModelConfig) -> jax.Array:
    from mamba2_jax import Mamba2ForCausalLM

    layers, head = dict(enumerate(layer["block"] for layer in weights["layers"])), weights["head"]
    backbone = {"embedder": weights["embedding"]["table"], "layers": layers}
    backbone |= {"final_norm": {"weight": head["norm"]["scale"]}}
    module = Mamba2ForCausalLM(mamba2_config(config), rngs=nnx.Rngs(0))
    nnx.update(module, {"backbone": backbone, "lm_head": head["output"]})
    return module(tokens)["logits"]


def _positions(tokens: jax.Array) -> jax.Array:
    return jnp.broadcast_to(jnp.arange(tokens.shape[-1]), tokens.shape)


class Published(NamedTuple):
    """A package's block as a family, and its plain loss on one device.

    `whole(weights, tokens, config)` are the logits of the package's own model, with a family's weights in it.
    """

    module: str  # of the package, which has the block
    family: Family
    loss: Any
    whole: Whole

    @classmethod
    def of(cls, module: str, embed: Any, block: Any, head: Any, whole: Whole) -> "Published":
        made = family(embed=embed, block=block, head=head)
        return cls(module, made, plain_loss(embed, block, head), whole)


LLAMA = "vidax.models.hunyuan_video.hunyuan_video.llama_text"
PACKAGES = {
    "gpt2": Published.of("transformers.models.gpt2.modeling_flax_gpt2", Gpt2Embed, Gpt2Block, Gpt2Head, gpt2_whole),
    "flax_bert": Published.of(
        "transformers.models.bert.modeling_flax_bert", BertEmbed, BertBlock, BertHead, bert_whole
    ),
    "vidax": Published.of(LLAMA, VidaxEmbed, VidaxBlock, VidaxHead, vidax_whole),
    "dantinox": Published.of("dantinox.core.block", DantinoxEmbed, DantinoxBlock, DantinoxHead, dantinox_whole),
    "mamba2": Published.of("mamba2_jax", Mamba2Embed, Mamba2Block, Mamba2Head, mamba2_whole),
}
