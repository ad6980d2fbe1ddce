"""Runs the layers of one stage forward and backward, with the residuals in slots of a stash.

Each pass updates its arrays in place: the forward writes each layer's residuals directly into the stash, the backward
adds each layer's gradient directly to the accumulator. Invariant: a stage with n layers touches n rows of the stacked
weights, however many the other stages have, so each stage costs what its own layers cost.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from fiddlex.pipeline import layer_losses
from fiddlex.pipeline.codec import Codec
from fiddlex.pipeline.residuals import Arrays, SplitVjp

Tree = Any
Integer = jax.Array | int  # an int32 scalar
Tile = tuple[int, int] | None  # multiples to which devices pad an array's last two dimensions in memory; None: any
# (layer, x, (number, microbatch), earlier) -> (x, new). `earlier`: what the layer keeps of earlier tokens, [example,
# slot, …], no arrays in a first pass; `new`: what it adds, [example, new slot, …].
CachedLayer = Callable[[Tree, jax.Array, Any, Arrays], tuple[jax.Array, Arrays]]


class Chunk(NamedTuple):
    """The rows of the stacked weights and gradients that belong to a stage on this device."""

    weights: Tree  # of all chunks and versions, [row, ...]
    row: Integer  # the first row of the stage's weights
    grad_row: Integer  # the first row of the stage's gradients
    layer: Integer  # the number of the stage's first layer in the model
    num_layers: Integer  # an int where all chunks have the same number


class Slot(NamedTuple):
    """A stash and the number of one of its slots; leaves are [slot, row, ...]."""

    leaves: Arrays
    number: Integer

    def read(self, index: Integer) -> Arrays:
        """The arrays at row `index`, which is the turn of a loop or made from it."""
        number = in_turn(self.number, index)  # a stash may have one row, so that `index` alone does not hold the work
        return [
            lax.dynamic_slice(leaf, _indices(leaf, number, index), (1, 1, *leaf.shape[2:]))[0, 0]
            for leaf in self.leaves
        ]


class Kept(NamedTuple):
    """What one layer saves in a pass, and the losses that it adds."""

    stash: Arrays
    weight_stash: Arrays
    losses: Arrays


class Cache(NamedTuple):
    """What layers keep of tokens in incremental decoding, with the rows of the stacked weights.

    A loop that read and wrote the same array would copy it for every layer, so a pass only reads `earlier`.
    """

    earlier: Arrays  # of earlier tokens, [row, example, slot, …]; none where the pass is the first one
    new: Arrays  # of this pass's tokens, [row, example, new slot, …]; the pass replaces all values


class Stage:
    """The passes through a stage; the arguments are fields of `PipelineModel`."""

    def __init__(
        self,
        layer: Callable[[Tree, jax.Array, Any], Any],
        cached_layer: CachedLayer | None = None,
        *,
        recompute: bool,
        tile: Tile = None,
        codec: Codec | None = None,
    ):
        self._layer, self._cached_layer = layer, cached_layer
        self._vjp = SplitVjp(layer, recompute=recompute, codec=codec)
        self._tile = tile

    def kept(self, chunk: Chunk, x: jax.Array, microbatch: Tree, *, splits: bool) -> Kept:
        """What one layer saves in the stash and, where a schedule splits B into I and W, in the weight stash."""
        weights, again = _row(chunk.weights, chunk.row), (chunk.layer, microbatch)
        y, stashed, losses = self._vjp.forward(weights, x, again)
        return Kept(stashed, self._vjp.backward_input(weights, again, stashed, y).left if splits else [], losses)

    def forward(
        self, chunk: Chunk, x: jax.Array, microbatch: Tree, stash: Slot | None, losses: Arrays
    ) -> tuple[jax.Array, Arrays, Arrays]:
        """The stage's output, the leaves of `stash` with the residuals in its slot, and `losses` with those added.

        Without a stash there are no leaves, and nothing is added.
        """

        def body(index: jax.Array, carry: tuple[jax.Array, Arrays, Arrays]) -> tuple[jax.Array, Arrays, Arrays]:
            x, leaves, losses = carry
            weights, again = _row(chunk.weights, chunk.row + index), (chunk.layer + index, microbatch)
            if stash is None:
                return layer_losses.split(self._layer(weights, x, again))[0], leaves, losses
            x, residuals, further = self._vjp.forward(weights, x, again)
            with jax.named_scope("stash"):
                leaves = _write(leaves, stash.number, index, self._in_order(residuals))
            return x, leaves, [total + loss for total, loss in zip(losses, further, strict=True)]

        return lax.fori_loop(0, chunk.num_layers, body, (x, stash.leaves if stash else [], losses))

    def forward_cached(self, chunk: Chunk, x: jax.Array, tokens: Tree, cache: Cache) -> tuple[jax.Array, Arrays]:
        """The stage's output for new tokens, and `cache.new` with what the stage's layers keep of them."""
        layer = self._cached_layer
        assert layer is not None

        def body(index: jax.Array, carry: tuple[jax.Array, Arrays]) -> tuple[jax.Array, Arrays]:
            x, leaves = carry
            row = chunk.row + index
            x, new = layer(_row(chunk.weights, row), x, (chunk.layer + index, tokens), _row(cache.earlier, row))
            return x, [
                lax.dynamic_update_slice(leaf, value[None], _indices(leaf, row))
                for leaf, value in zip(leaves, new, strict=True)
            ]

        return lax.fori_loop(0, chunk.num_layers, body, (x, cache.new))

    def backward(
        self, chunk: Chunk, dy: jax.Array, microbatch: Tree, stash: Slot, grads: Tree
    ) -> tuple[jax.Array, Tree]:
        """B: the gradient of the stage's input, and `grads` [row, ...] with the gradients of the weights added."""

        def body(step: jax.Array, carry: tuple[jax.Array, Tree]) -> tuple[jax.Array, Tree]:
            dy, grads = carry
            index, weights, again = _from_last(chunk, step, microbatch)
            dweights, dx = self._vjp.backward(weights, again, self._in_order(stash.read(index)), dy)
            return dx, _add(grads, chunk.grad_row + index, jax.tree.leaves(dweights))

        return lax.fori_loop(0, chunk.num_layers, body, (dy, grads))

    def backward_input(
        self, chunk: Chunk, dy: jax.Array, microbatch: Tree, stash: Slot, weight_stash: Slot, grads: Tree
    ) -> tuple[jax.Array, Arrays, Tree]:
        """I: the gradient of the stage's input, the leaves of `weight_stash`, and `grads` [row, ...].

        The slot of `weight_stash` gets what W needs; `grads` gets the gradients of weights that take no matrix product.
        """

        def body(step: jax.Array, carry: tuple[jax.Array, Arrays, Tree]) -> tuple[jax.Array, Arrays, Tree]:
            dy, leaves, grads = carry
            index, weights, again = _from_last(chunk, step, microbatch)
            result = self._vjp.backward_input(weights, again, self._in_order(stash.read(index)), dy)
            with jax.named_scope("weight_stash"):
                leaves = _write(leaves, weight_stash.number, index, self._in_order(result.left))
            return result.dx, leaves, _add(grads, chunk.grad_row + index, result.dgiven)

        return lax.fori_loop(0, chunk.num_layers, body, (dy, weight_stash.leaves, grads))

    def backward_weights(
        self, chunk: Chunk, like: jax.Array, microbatch: Tree, stash: Slot, weight_stash: Slot, grads: Tree
    ) -> Tree:
        """W: `grads` plus the gradients that the pass I deferred; `like` is any array of the type of an activation."""

        def body(step: jax.Array, grads: Tree) -> Tree:
            index, weights, again = _from_last(chunk, step, microbatch)
            stashed, left = self._in_order(stash.read(index)), self._in_order(weight_stash.read(index))
            dweights = self._vjp.backward_weights(weights, again, stashed, left, like)
            return _add(grads, chunk.grad_row + index, dweights)

        return lax.fori_loop(0, chunk.num_layers, body, grads)

    def _in_order(self, arrays: Arrays) -> Arrays:
        return in_row_major(arrays, self._tile)


def in_turn(number: Integer, turn: Integer) -> Integer:
    """`number`, which depends on the turn of a loop, 0 or more, as far as XLA can tell.

    XLA moves work that does not depend on the turn out of a loop of zero or more turns, where it would run in every
    tick. An optimization barrier would hold the work too, but where the number of turns is known, XLA:GPU computes
    where each turn reads, and fails at a barrier (github.com/openxla/xla/issues/49299).
    """
    return number + jnp.minimum(turn, 0)


def in_row_major(tree: Tree, tile: Tile) -> Tree:
    """Constrains arrays to row-major order in memory, whatever order suits the code that writes or reads them.

    Random keys and arrays that the tile would pad may have any order.
    """

    def ordered(x: jax.Array) -> jax.Array:
        padded = tile is None or any(size % multiple for size, multiple in zip(x.shape[::-1], tile[::-1], strict=False))
        free = padded or jnp.issubdtype(x.dtype, jax.dtypes.extended)
        return x if free else with_layout_constraint(x, Layout(tuple(range(x.ndim))))

    return jax.tree.map(ordered, tree)


def in_least_padded_order(x: jax.Array, tile: Tile) -> jax.Array:
    """Constrains an array to an order in memory that needs the least padding; row-major if no order needs less.

    `x` is inside `shard_map`. Without a tile it may have any order.
    """
    if tile is None or x.ndim < 2:
        return x

    def elements(pair: tuple[int, int]) -> int:
        rest = x.size // math.prod(x.shape[axis] for axis in pair)
        return rest * math.prod(-(-x.shape[axis] // size) * size for axis, size in zip(pair, tile, strict=True))

    pairs = itertools.permutations(range(x.ndim), 2)
    best = min(pairs, key=lambda pair: (elements(pair), pair != (x.ndim - 2, x.ndim - 1)))
    return with_layout_constraint(x, Layout((*(axis for axis in range(x.ndim) if axis not in best), *best)))


def _row(weights: Tree, row: Any) -> Tree:
    return jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, row, keepdims=False), weights)


def _from_last(chunk: Chunk, step: Integer, microbatch: Tree) -> tuple[Integer, Tree, Any]:
    """Index, weights and second arguments of the layer that comes `step` layers before the stage's last."""
    index = chunk.num_layers - 1 - step
    return index, _row(chunk.weights, chunk.row + index), (chunk.layer + index, microbatch)


def _indices(leaf: jax.Array, *first: Integer) -> list[jax.Array]:
    """An index for each dimension, 0 where `first` has none, all int32 even where jax enables 64 bits."""
    return [jnp.int32(number) for number in (*first, *[0] * (leaf.ndim - len(first)))]


def _write(leaves: Arrays, slot: Integer, index: Integer, values: Arrays) -> Arrays:
    return [
        lax.dynamic_update_slice(leaf, value[None, None], _indices(leaf, slot, index))
        for leaf, value in zip(leaves, values, strict=True)
    ]


@jax.named_scope("gradients")
def _add(grads: Tree, row: Integer, values: Arrays) -> Tree:
    """`grads` with `values` added at row `row`, in the dtype of `grads`; None adds nothing."""
    leaves, structure = jax.tree.flatten(grads)
    for number, value in enumerate(values):
        if value is not None:
            total = lax.dynamic_index_in_dim(leaves[number], row) + value[None].astype(leaves[number].dtype)
            leaves[number] = lax.dynamic_update_slice_in_dim(leaves[number], total, row, 0)
    return jax.tree.unflatten(structure, leaves)
