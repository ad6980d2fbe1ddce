"""The interface between a model and training: pure functions of the model's weights, as the pipeline calls them.

Weights are a nested dictionary with the keys `embedding`, `layers` and `head`, whose entries a description names
(`fiddlex.models.spec`). Leaves under `layers` have a leading dimension with one row for each layer
(`fiddlex.schedules.placement`). Embedding and head take the whole dictionary except for its layers, since the head may
use the embedding's table too.
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from fiddlex.config import Config
from fiddlex.models.context import Context
from fiddlex.models.embedding import embed
from fiddlex.models.layers import transformer_layer
from fiddlex.models.registry import network_of
from fiddlex.models.weights import Weights, initial_weights, logical_axes

Batch = dict[str, Any]


class Model(abc.ABC):
    """A model as pure functions of its weights, to be called inside `shard_map` over all mesh axes.

    A family's class adds the head, and may override the embedding and the layers. A batch's leaves are [example, …]; an
    example may have several sequences, which pass through the layers as [sequence, …]. The loss is the sum of `parts`,
    `tokens`, `labels` or both: each is the mean of its terms over a whole batch, weighted by the batch's leaf in
    `WEIGHTS`. Where `adds_losses` is true, `apply_layer` returns `(x, loss)`, and the mean of a layer's losses over the
    microbatches of a batch is added, the sum over the layers.
    """

    adds_losses: bool = False
    WEIGHTS: ClassVar[dict[str, str]] = {"tokens": "weights", "labels": "label_weights"}

    def __init__(self, config: Config):
        self.config, self.network = config.model, network_of(config)
        self._vocab_rows = config.padded_vocab_size
        task = self.network.task
        self.parts = ("tokens",) * bool(task.num_scored) + ("labels",) * bool(task.num_outputs)

    @property
    def causal(self) -> bool:
        return self.network.attention.causal

    def init(self, key: jax.Array, layers: Sequence[int]) -> Weights:
        """Initial float32 weights with global shapes; the same key gives the same numbers on every mesh.

        `layers` has the number of the layer in each row of the stacked weights, negative for a row of zeros
        (`LayerPlacement.layers`).
        """
        embedding, of_layers = jax.random.split(key)
        numbers, network = jnp.asarray(layers), self.network

        def layer(key: jax.Array) -> Weights:
            return initial_weights(network.layer, key, vocab_rows=self._vocab_rows)

        rows = jax.vmap(layer)(jax.random.split(of_layers, network.num_layers)[numbers])
        return {
            "embedding": initial_weights(network.embedding, embedding, vocab_rows=self._vocab_rows),
            "layers": jax.tree.map(lambda w: jnp.where(_like_rows(numbers >= 0, w), w, 0), rows),
            "head": initial_weights(network.head, jax.random.fold_in(key, 2), vocab_rows=self._vocab_rows),
        }

    def axes(self) -> Weights:
        return {
            part: logical_axes(parameters, before=("layers",) if part == "layers" else ())
            for part, parameters in self.network.parts.items()
        }

    def embed(self, weights: Weights, batch: Batch, context: Context) -> jax.Array:
        """Embeds `batch["tokens"]`, int32 [example, …, S]; returns [B, T, H], the same on every pipe rank."""
        types = batch.get("token_types")
        return embed(
            weights["embedding"],
            as_rows(batch["tokens"]),
            None if types is None else as_rows(types),
            context,
            epsilon=self.config.layer_norm_epsilon,
        )

    def apply_layer(self, layer: Weights, x_BTH: jax.Array, number: jax.Array, context: Context) -> Any:
        """Maps the residual stream through layer `number`; also returns a loss, a float scalar, with `adds_losses`."""
        if context.dropout is not None:
            context = dataclasses.replace(context, dropout=context.dropout.in_layer(number))
        return self.layer(layer, x_BTH, context)

    def layer(self, weights: Weights, x_BTH: jax.Array, context: Context) -> jax.Array:
        """Maps the residual stream through a layer; `context` has the dropout of that layer."""
        config = self.config
        return transformer_layer(
            weights,
            x_BTH,
            context,
            post_norm=config.post_norm,
            epsilon=config.layer_norm_epsilon,
            gelu=config.gelu,
        )

    @abc.abstractmethod
    def loss(self, weights: Weights, x_BTH: jax.Array, batch: Batch, context: Context) -> jax.Array:
        """The sum of the weighted terms of all parts over this replica's examples, a float32 scalar."""

    @abc.abstractmethod
    def scores(self, weights: Weights, x_BTH: jax.Array, batch: Batch, context: Context) -> jax.Array:
        """Sums of weighted terms, of weights, and of weights of correct guesses, float32 [example, part, 3]."""


def as_rows(x: jax.Array) -> jax.Array:
    """Reshapes [example, …, S] to [row, S]."""
    return x.reshape(-1, x.shape[-1])


def sums(losses: jax.Array, weights: jax.Array, right: jax.Array) -> jax.Array:
    """The sums that `Model.scores` returns for a part, float32 [example, 3], from arrays [example, …] of its terms."""
    weights = weights.astype(jnp.float32)
    terms = jnp.stack([losses * weights, weights, right * weights], axis=-1)
    return terms.reshape(len(terms), -1, 3).sum(axis=1)


def _like_rows(x_R: jax.Array, w: jax.Array) -> jax.Array:
    return x_R.reshape(-1, *[1] * (w.ndim - 1))
