"""A model made of three Flax modules, as the pipeline calls it.

The ranks of `pipe` × `tensor` share the vocabulary, as in fiddlex's own families (`fiddlex.models.sharded_vocabulary`):
of a weight of embedding or head that has a dimension of the size of the vocabulary, a rank has a part along it. Where
the vocabulary has no equal parts, or modules hide it, each rank has these weights whole and computes all logits.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fiddlex.config import Config
from fiddlex.flax.alone import alone
from fiddlex.flax.operations import Cut, Place
from fiddlex.flax.parts import Part
from fiddlex.models.context import Context
from fiddlex.models.decoder import NextTokenModel
from fiddlex.models.model import Batch, as_rows
from fiddlex.models.sharded_vocabulary import VOCAB_AXES, without_padding
from fiddlex.models.weights import Weights
from fiddlex.parallel.collectives import SEQUENCE_DIMENSION, all_positions, as_varying_over, own_positions
from fiddlex.pipeline import layer_losses

Keys = jax.Array | None  # one for each example; None where nothing is dropped
Places = Sequence[Place]


class Functions:
    """The three modules as functions of their weights, their input, and what is not differentiated.

    Args:
      places: what a tensor rank has of each weight of a layer (`fiddlex.flax.partition`).
      vocabulary: what a rank of `pipe` × `tensor` has of each weight of `embedding` and of `head`.
      adds_losses: whether a layer returns `(x, loss)`, as in `Model`.
      sequence_parallel: whether a tensor rank has a part of the sequence of a layer's input and result.
    """

    def __init__(
        self,
        parts: dict[str, Part],
        places: Places,
        vocabulary: dict[str, Places],
        *,
        adds_losses: bool,
        sequence_parallel: bool,
    ):
        self.parts, self.places, self.plain = parts, places, plain_functions(parts)
        self.vocabulary, self.adds_losses = vocabulary, adds_losses
        outer = [*vocabulary["embedding"], *vocabulary["head"]]
        self.shares_vocabulary = any(place is not None for place in outer)
        self.embed = alone(self.plain["embed"], vocabulary["embedding"], axes=VOCAB_AXES)
        # [B, S, V / ranks] where the ranks share the vocabulary, else [B, S, V]
        result = Cut(2) if self.shares_vocabulary else None
        self.logits = alone(self.plain["head"], outer, axes=VOCAB_AXES, result=result)
        self.stream = Cut(SEQUENCE_DIMENSION, yields=True) if sequence_parallel else None
        self.layer = alone(self.plain["block"], places, given=self.stream, result=self.stream)


def plain_functions(parts: dict[str, Part]) -> dict[str, Callable[..., Any]]:
    """The functions of `Functions` on one device, by role.

    `embed` and `block` take the weights of their own part, `head` those of both `embedding` and `head`.
    """
    embed, block, head = (parts[name] for name in ("embedding", "layers", "head"))

    def embedded(weights: Weights, like: jax.Array, again: tuple[jax.Array, Keys]) -> jax.Array:
        tokens_BS, keys_B = again
        return by_example(functools.partial(embed.apply, weights), keys_B, tokens_BS)

    def layer(weights: Weights, x_BSH: jax.Array, keys_B: Keys) -> Any:
        return by_example(functools.partial(block.apply, weights), keys_B, x_BSH)

    def logits(weights: Weights, x_BSH: jax.Array, keys_B: Keys) -> jax.Array:
        others = {"embed": embed.bound(weights["embedding"])} if head.takes_embed else {}
        return by_example(functools.partial(head.apply, weights["head"], **others), keys_B, x_BSH)

    return {"embed": embedded, "block": layer, "head": logits}


def by_example(call: Callable[[Keys, jax.Array], Any], keys_B: Keys, x_B: jax.Array) -> Any:
    """`call(key, x)` of a batch; with keys, of each example by itself, so that no layout changes what it draws.

    A loss beside the array is then the mean of those of the examples. One key in place of keys is for the whole batch.
    """
    if keys_B is None or not keys_B.ndim:
        return call(keys_B, x_B)

    def one(key: jax.Array, x: jax.Array) -> Any:
        y, losses = layer_losses.split(call(key, x[None]))
        return y[0], losses

    y_B, losses_B = jax.vmap(one)(keys_B, x_B)
    return (y_B, *(loss_B.mean() for loss_B in losses_B)) if losses_B else y_B


class FlaxModel(NextTokenModel):
    """The `Model` of a family that `fiddlex.flax.family` made."""

    def __init__(self, config: Config, functions: Functions):
        super().__init__(config)
        self._functions, self.adds_losses = functions, functions.adds_losses

    def init(self, key: jax.Array, layers: Any) -> Weights:
        parts = self._functions.parts
        embedding, of_layers = jax.random.split(key)
        numbers = jnp.asarray(layers)
        rows = jax.vmap(parts["layers"].init)(jax.random.split(of_layers, self.config.num_layers)[numbers])

        def real(w: jax.Array) -> jax.Array:
            return jnp.where((numbers >= 0).reshape(-1, *[1] * (w.ndim - 1)), w, 0)

        return {
            "embedding": parts["embedding"].init(embedding),
            "layers": jax.tree.map(real, rows),
            "head": parts["head"].init(jax.random.fold_in(key, 2)),
        }

    def embed(self, weights: Weights, batch: Batch, context: Context) -> jax.Array:
        again = as_rows(batch["tokens"]), self._keys(context, self.config.num_layers)
        x_BSH = self._functions.embed(weights["embedding"], jnp.zeros((), self.config.dtype), again)
        return own_positions(x_BSH) if context.sequence_parallel else x_BSH

    def apply_layer(self, layer: Weights, x_BTH: jax.Array, number: jax.Array, context: Context) -> Any:
        return self._functions.layer(layer, x_BTH, self._keys(context, number))

    def logits(self, weights: Weights, x_BTH: jax.Array, context: Context) -> jax.Array:
        weights = {name: weights[name] for name in ("embedding", "head")}
        x_BSH = all_positions(x_BTH) if context.sequence_parallel else x_BTH
        logits_BSV = self._functions.logits(weights, x_BSH, self._keys(context, self.config.num_layers + 1))
        logits_BSV = logits_BSV.astype(jnp.float32)
        return logits_BSV if self._functions.shares_vocabulary else self._own(logits_BSV)

    def _own(self, logits_BSV: jax.Array) -> jax.Array:
        """This rank's slice of logits that every rank has."""
        size = self._vocab_rows // lax.axis_size(VOCAB_AXES)
        logits_BSV = jnp.pad(logits_BSV, ((0, 0), (0, 0), (0, self._vocab_rows - logits_BSV.shape[-1])))
        logits_BSV = as_varying_over(logits_BSV, frozenset(VOCAB_AXES))
        logits_BSV = lax.dynamic_slice_in_dim(logits_BSV, lax.axis_index(VOCAB_AXES) * size, size, axis=2)
        return without_padding(logits_BSV, self.config.vocab_size)

    def _keys(self, context: Context, number: jax.Array | int) -> Keys:
        """A key for each example at layer `number`; the embedding and the head come after the layers."""
        if context.dropout is None:
            return None
        return jax.vmap(lambda key: jax.random.fold_in(key, number))(context.dropout.keys_B)
