"""What GPT and BERT share: a stack of layers between an embedding and a head, as the pipeline wants it.

Weights are a nested dictionary with those three keys. Leaves under `layers` have a leading dimension, a row for each
layer (`fiddlex.pipeline.placement`). The embedding's table serves the head too, so both take the whole dictionary, but
for its layers.
"""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from fiddlex.config import Config
from fiddlex.models.context import Context
from fiddlex.models.embedding import Embedding
from fiddlex.models.functional import Functional, Weights
from fiddlex.models.layers import Block

Batch = dict[str, Any]
Head = TypeVar("Head", bound=nnx.Module)


class Transformer(abc.ABC, Generic[Head]):
    """A model as pure functions of its weights, to be called inside `shard_map` over all mesh axes.

    Subclasses add the head. A batch's leaves are [example, …]; an example may have several rows, each a sequence, which
    pass through the layers as [row, …].

    Args:
      config: of the run.
      make_head: makes what of the head has weights of its own, from its random streams.
      num_token_types: that the embedding knows; 0: none.

    Attributes:
      config: of the model.
      causal: whether a position sees no position after it.
      parts: what the loss is the sum of: `tokens`, `labels` or both. Each is the mean of its terms over a whole batch,
        weighted by the batch's leaf of that part (`WEIGHTS`).
    """

    WEIGHTS: ClassVar[dict[str, str]] = {"tokens": "weights", "labels": "label_weights"}

    causal: bool
    parts: tuple[str, ...]

    def __init__(self, config: Config, make_head: Callable[[nnx.Rngs], Head], *, num_token_types: int = 0):
        self.config = config.model
        rows = config.padded_vocab_size
        self._embedding = Functional(lambda rngs: Embedding(config.model, rows, num_token_types, rngs=rngs))
        self._block = Functional(lambda rngs: Block(config.model, rngs=rngs))
        self._head = Functional(make_head)

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
            "head": self._head.init(jax.random.fold_in(key, 2)),
        }

    def axes(self) -> Weights:
        """Logical axes of every weight."""
        layers = jax.tree.map(
            lambda axes: ("layers", *axes), self._block.axes(), is_leaf=lambda x: isinstance(x, tuple)
        )
        return {"embedding": self._embedding.axes(), "layers": layers, "head": self._head.axes()}

    def embed(self, weights: Weights, batch: Batch, context: Context) -> jax.Array:
        """Embeds `batch["tokens"]`, int32 [example, …, S]; [B, T, H], the same on every pipe rank."""
        types = batch.get("token_types")
        return self._embedding.bind(weights["embedding"])(
            as_rows(batch["tokens"]), None if types is None else as_rows(types), context
        )

    def apply_layer(self, layer: Weights, x_BTH: jax.Array, number: jax.Array, context: Context) -> jax.Array:
        """Maps the residual stream through layer `number` of the model, with the weights of one row."""
        if context.dropout is not None:
            context = dataclasses.replace(context, dropout=context.dropout.in_layer(number))
        return self._block.bind(layer)(x_BTH, context)

    @abc.abstractmethod
    def loss(self, weights: Weights, x_BTH: jax.Array, batch: Batch, context: Context) -> jax.Array:
        """The sum over this replica's examples of all parts' weighted terms, float32 scalar."""

    @abc.abstractmethod
    def scores(self, weights: Weights, x_BTH: jax.Array, batch: Batch, context: Context) -> jax.Array:
        """Of each example and part three sums: of weighted terms, of weights, and of weights of right guesses.

        Returns:
          float32 [example, part, 3].
        """


Model = Transformer[Any]


def as_rows(x: jax.Array) -> jax.Array:
    """[example, …, S] as [row, S]."""
    return x.reshape(-1, x.shape[-1])


def sums(losses: jax.Array, weights: jax.Array, right: jax.Array) -> jax.Array:
    """What `Transformer.scores` tells of one part, float32 [example, 3], of arrays [example, …] of its terms."""
    weights = weights.astype(jnp.float32)
    terms = jnp.stack([losses * weights, weights, right * weights], axis=-1)
    return terms.reshape(len(terms), -1, 3).sum(axis=1)


def _like_rows(x_R: jax.Array, w: jax.Array) -> jax.Array:
    return x_R.reshape(-1, *[1] * (w.ndim - 1))
