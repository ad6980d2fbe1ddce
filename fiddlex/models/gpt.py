"""GPT-2 (Radford et al. 2019): pre-LN decoder, learned positions, tied embeddings.

The model is three parts, as the pipeline wants it: an embedding before the layers, the layers, and a head after them.
Weights are a nested dictionary with those three keys. Leaves under `layers` have a leading dimension, a row for each
layer (`fiddlex.pipeline.placement`). The embedding's table serves the head too, so both take the whole dictionary, but
for its layers.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from fiddlex.config import Config, ModelConfig
from fiddlex.models.context import Context
from fiddlex.models.dropout import EMBEDDING_SITE
from fiddlex.models.functional import Functional, Weights, param
from fiddlex.models.layers import Block, LayerNorm
from fiddlex.models.operators import add_bias
from fiddlex.models.vocabulary import cross_entropy, embed_tokens, local_logits
from fiddlex.parallel.collectives import enter_tensor_parallel

Batch = dict[str, Any]


class Embedding(nnx.Module):
    """Token table, padded to `rows` rows with zeros, and learned positions."""

    def __init__(self, config: ModelConfig, rows: int, *, rngs: nnx.Rngs):
        shape = (config.vocab_size, config.hidden_size)
        tokens = config.init_std * jax.random.normal(rngs.params(), shape, jnp.float32)
        shape = (config.seq_len, config.hidden_size)
        positions = config.init_std * jax.random.normal(rngs.params(), shape, jnp.float32)
        self.tokens = param(jnp.pad(tokens, ((0, rows - config.vocab_size), (0, 0))), ("vocab", "hidden"))
        self.positions = param(positions, ("positions", "hidden"))

    def __call__(self, tokens_BS: jax.Array, context: Context) -> jax.Array:
        """Embeds tokens; [B, T, H]."""
        x_BTH = embed_tokens(self.tokens[...], tokens_BS, sequence_parallel=context.sequence_parallel)
        length = x_BTH.shape[1]
        first = lax.axis_index("tensor") * length if context.sequence_parallel else 0
        x_BTH = add_bias(x_BTH, lax.dynamic_slice_in_dim(self.positions[...], first, length))
        if context.dropout is None:
            return x_BTH
        return context.dropout.residual(x_BTH, EMBEDDING_SITE, sequence_parallel=context.sequence_parallel)


class Head(nnx.Module):
    """The final LayerNorm; scoring uses the embedding's table."""

    def __init__(self, config: ModelConfig):
        self.norm = LayerNorm(config)


class GPT:
    """The model as pure functions of its weights, to be called inside `shard_map` over all mesh axes."""

    def __init__(self, config: Config):
        self.config = config.model
        rows = config.padded_vocab_size
        self._embedding = Functional(lambda rngs: Embedding(config.model, rows, rngs=rngs))
        self._block = Functional(lambda rngs: Block(config.model, rngs=rngs))
        self._head = Functional(lambda rngs: Head(config.model))

    def init(self, key: jax.Array, layers: Sequence[int]) -> Weights:
        """Fresh float32 weights with global shapes; for the same key the same numbers on every mesh.

        Args:
          key: of the random numbers.
          layers: number of the layer in each row of the stacked ones, negative for a row of zeros
            (`LayerPlacement.layers`).
        """
        embedding, of_layers = jax.random.split(key)
        numbers = jnp.asarray(layers)
        rows = jax.vmap(self._block.init)(jax.random.split(of_layers, self.config.num_layers)[numbers])
        return {
            "embedding": self._embedding.init(embedding),
            "layers": jax.tree.map(lambda w: jnp.where(_like_rows(numbers >= 0, w), w, 0), rows),
            "head": self._head.init(key),  # draws nothing
        }

    def axes(self) -> Weights:
        """Logical axes of every weight."""
        layers = jax.tree.map(
            lambda axes: ("layers", *axes), self._block.axes(), is_leaf=lambda x: isinstance(x, tuple)
        )
        return {"embedding": self._embedding.axes(), "layers": layers, "head": self._head.axes()}

    def embed(self, weights: Weights, batch: Batch, context: Context) -> jax.Array:
        """Embeds `batch["tokens"]`, int32 [B, S]; [B, T, H], the same on every pipe rank."""
        return self._embedding.bind(weights["embedding"])(batch["tokens"], context)

    def apply_layer(self, layer: Weights, x_BTH: jax.Array, number: jax.Array, context: Context) -> jax.Array:
        """Maps the residual stream through layer `number` of the model, with the weights of one row."""
        if context.dropout is not None:
            context = dataclasses.replace(context, dropout=context.dropout.in_layer(number))
        return self._block.bind(layer)(x_BTH, context)

    def loss(self, weights: Weights, x_BTH: jax.Array, batch: Batch, context: Context) -> jax.Array:
        """Sum over this replica's tokens of `batch["weights"]` times −log p(`batch["targets"]`), float32 scalar."""
        losses_BS = cross_entropy(self._logits(weights, self._normed(weights, x_BTH, context)), batch["targets"])
        return jnp.sum(losses_BS * batch["weights"])

    def next_logits(self, weights: Weights, x_BTH: jax.Array, batch: Batch, context: Context) -> jax.Array:
        """This rank's slice of the logits at `batch["positions"]`, int32 [B]; float32 [B, V / vocabulary shards]."""
        x_BSH = self._normed(weights, x_BTH, context)
        x_B1H = jnp.take_along_axis(x_BSH, batch["positions"][:, None, None], axis=1)
        return self._logits(weights, x_B1H)[:, 0]

    def _normed(self, weights: Weights, x_BTH: jax.Array, context: Context) -> jax.Array:
        x_BTH = self._head.bind(weights["head"]).norm(x_BTH)
        return enter_tensor_parallel(x_BTH, sequence_parallel=context.sequence_parallel)

    def _logits(self, weights: Weights, x_BSH: jax.Array) -> jax.Array:
        return local_logits(x_BSH, weights["embedding"]["tokens"], vocab_size=self.config.vocab_size)


def _like_rows(x_R: jax.Array, w: jax.Array) -> jax.Array:
    return x_R.reshape(-1, *[1] * (w.ndim - 1))
