"""A model made of three Flax modules, as the pipeline calls it.

Embedding and head are whole on every device. The ranks of `pipe` and of `tensor` share their work: each embeds and
scores some of the examples of a microbatch, and the gradients of these modules' weights are summed over the ranks once
per batch (`Parameter.partial`).
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fiddlex.config import Config
from fiddlex.flax.alone import alone
from fiddlex.flax.operations import Place
from fiddlex.flax.parts import Part
from fiddlex.models.context import Context
from fiddlex.models.model import Batch, Model, as_rows, sums
from fiddlex.models.weights import Weights
from fiddlex.parallel.collectives import as_varying_over
from fiddlex.pipeline import layer_losses

Keys = jax.Array | None  # one for each example; None where nothing is dropped
SHARING = ("pipe", "tensor")  # axes whose ranks share embedding and head by examples


class Functions:
    """The three modules as functions of their weights, their input, and what is not differentiated.

    Args:
      places: what a tensor rank has of each weight of a layer (`fiddlex.flax.partition`).
      adds_losses: whether a layer returns `(x, loss)`, as in `Model`.
    """

    def __init__(self, parts: dict[str, Part], places: Sequence[Place], *, adds_losses: bool):
        self.parts, self.places, self.plain = parts, places, plain_functions(parts)
        self.adds_losses = adds_losses
        self.embed, self.logits = alone(self.plain["embed"]), alone(self.plain["head"])
        self.layer = alone(self.plain["block"], places)


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

    A loss beside the array is then the mean of those of the examples.
    """
    if keys_B is None:
        return call(None, x_B)

    def one(key: jax.Array, x: jax.Array) -> Any:
        y, losses = layer_losses.split(call(key, x[None]))
        return y[0], losses

    y_B, losses_B = jax.vmap(one)(keys_B, x_B)
    return (y_B, *(loss_B.mean() for loss_B in losses_B)) if losses_B else y_B


class Share(NamedTuple):
    """The examples of a microbatch that this rank of `SHARING` embeds or scores."""

    first: jax.Array
    size: int
    works: jax.Array  # bool: whether no rank before this one has the same examples

    @classmethod
    def of(cls, examples: int) -> "Share":
        rank, parts = lax.axis_index(SHARING), math.gcd(examples, lax.axis_size(SHARING))
        size = examples // parts
        return cls(rank % parts * size, size, rank < parts)

    def take(self, x_B: Any) -> Any:
        """This rank's examples of arrays that are the same on all ranks."""

        def part(x: jax.Array) -> jax.Array:
            return lax.dynamic_slice_in_dim(as_varying_over(x, frozenset(SHARING)), self.first, self.size)

        return jax.tree.map(part, x_B)

    def whole(self, y_B: jax.Array, examples: int) -> jax.Array:
        """The results of all ranks together, the same on each."""
        y_B = self.once(y_B)
        whole = jnp.zeros_like(y_B, shape=(examples, *y_B.shape[1:]))
        return lax.psum(lax.dynamic_update_slice_in_dim(whole, y_B, self.first, 0), SHARING)

    def once(self, y: jax.Array) -> jax.Array:
        return jnp.where(self.works, y, 0)


class FlaxModel(Model):
    """The `Model` of a family that `fiddlex.flax.family` made; its objective is `lm`."""

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
        tokens_BS = as_rows(batch["tokens"])
        share = Share.of(len(tokens_BS))
        again = share.take((tokens_BS, self._keys(context, self.config.num_layers)))
        like = jnp.zeros((), self.config.dtype)
        return share.whole(self._functions.embed(weights["embedding"], like, again), len(tokens_BS))

    def apply_layer(self, layer: Weights, x_BTH: jax.Array, number: jax.Array, context: Context) -> Any:
        return self._functions.layer(layer, x_BTH, self._keys(context, number))

    def loss(self, weights: Weights, x_BTH: jax.Array, batch: Batch, context: Context) -> jax.Array:
        share = Share.of(len(x_BTH))
        logits_BSV, targets_BS, weights_BS = self._scored(weights, x_BTH, batch, context, share)
        return lax.psum(share.once(jnp.sum(_cross_entropy(logits_BSV, targets_BS) * weights_BS)), SHARING)

    def scores(self, weights: Weights, x_BTH: jax.Array, batch: Batch, context: Context) -> jax.Array:
        share = Share.of(len(x_BTH))
        logits_BSV, targets_BS, weights_BS = self._scored(weights, x_BTH, batch, context, share)
        right = jnp.argmax(logits_BSV, axis=-1) == targets_BS
        return share.whole(sums(_cross_entropy(logits_BSV, targets_BS), weights_BS, right)[:, None], len(x_BTH))

    def _scored(
        self, weights: Weights, x_BSH: jax.Array, batch: Batch, context: Context, share: Share
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Logits, targets and their weights of this rank's examples."""
        again = self._keys(context, self.config.num_layers + 1)
        x_BSH, again, targets, of_targets = share.take((x_BSH, again, batch["targets"], batch["weights"]))
        return self._functions.logits(weights, x_BSH, again), targets, of_targets

    def _keys(self, context: Context, number: jax.Array | int) -> Keys:
        """A key for each example at layer `number`; the embedding and the head come after the layers."""
        if context.dropout is None:
            return None
        return jax.vmap(lambda key: jax.random.fold_in(key, number))(context.dropout.keys_B)


def _cross_entropy(logits_BSV: jax.Array, targets_BS: jax.Array) -> jax.Array:
    logits_BSV = logits_BSV.astype(jnp.float32)
    target_BS1 = jnp.take_along_axis(logits_BSV, targets_BS[..., None], axis=-1)
    return jax.nn.logsumexp(logits_BSV, axis=-1) - target_BS1[..., 0]
