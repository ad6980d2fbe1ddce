"""GPT-2 (Radford et al. 2019): pre-LN decoder, learned positions, tied embeddings.

The model is three parts, as the pipeline wants it: an embedding before the layers, the stacked layers, and a head after
them. Weights are a nested dictionary with those three keys; leaves under `layers` have a leading layer dimension. The
embedding's table serves the head too, so the head takes the whole dictionary.
"""

import dataclasses
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
        tokens = config.init_std * jax.random.normal(rngs.params(), shape)
        positions = config.init_std * jax.random.normal(rngs.params(), (config.seq_len, config.hidden_size))
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

    def init(self, key: jax.Array) -> Weights:
        """Fresh float32 weights with global shapes; the same for the same key on every mesh, padding rows apart."""
        embedding, layers = jax.random.split(key)
        return {
            "embedding": self._embedding.init(embedding),
            "layers": jax.vmap(self._block.init)(jax.random.split(layers, self.config.num_layers)),
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

    def apply_layers(
        self, layers: Weights, x_BTH: jax.Array, first_layer: jax.Array | int, context: Context
    ) -> jax.Array:
        """Scans a run of stacked layers, of which the first is number `first_layer` of the model."""

        def apply(x_BTH: jax.Array, scanned: tuple[jax.Array, Weights]) -> tuple[jax.Array, None]:
            number, weights = scanned
            dropout = context.dropout.in_layer(number) if context.dropout else None
            return self._block.bind(weights)(x_BTH, dataclasses.replace(context, dropout=dropout)), None

        if context.recompute == "full":
            apply = jax.checkpoint(apply, prevent_cse=False)  # inside a scan nothing can be merged across the barrier
        num_layers = jax.tree.leaves(layers)[0].shape[0]
        return lax.scan(apply, x_BTH, (first_layer + jnp.arange(num_layers), layers))[0]

    def loss(self, weights: Weights, x_BTH: jax.Array, batch: Batch, context: Context) -> jax.Array:
        """Sum over this replica's tokens of `batch["weights"]` times −log p(`batch["targets"]`), float32 scalar."""
        losses_BS = cross_entropy(self._logits(weights, self._normed(weights, x_BTH, context)), batch["targets"])
        return jnp.sum(losses_BS * batch["weights"])

    def next_logits(self, weights: Weights, x_BTH: jax.Array, positions_B: jax.Array, context: Context) -> jax.Array:
        """This rank's slice of the logits at one position of each row, float32 [B, V / vocabulary shards]."""
        x_BSH = self._normed(weights, x_BTH, context)
        x_B1H = jnp.take_along_axis(x_BSH, positions_B[:, None, None], axis=1)
        return self._logits(weights, x_B1H)[:, 0]

    def _normed(self, weights: Weights, x_BTH: jax.Array, context: Context) -> jax.Array:
        x_BTH = self._head.bind(weights["head"]).norm(x_BTH)
        return enter_tensor_parallel(x_BTH, sequence_parallel=context.sequence_parallel)

    def _logits(self, weights: Weights, x_BSH: jax.Array) -> jax.Array:
        return local_logits(x_BSH, weights["embedding"]["tokens"], vocab_size=self.config.vocab_size)
