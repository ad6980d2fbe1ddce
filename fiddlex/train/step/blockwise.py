"""LAMB's trust ratio and Adafactor's second moments, clipping and step size, for layers stacked in a single array.

The papers (You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 Minutes, ICLR 2020; Shazeer &
Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, ICML 2018) define these statistics for the matrix
or vector of one layer. optax computes them over a whole leaf, which would mix the layers of a stacked leaf and count
the padding rows of the embedding.

Invariant: on the real elements, every transform does to a stacked, padded tree what optax does to the unstacked,
unpadded tree; padding rows whose weights and gradients are zero stay zero. The statistics run over global arrays: use
these transforms under `jit`, not inside `shard_map`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from fiddlex.models.spec import Matrix

# Adafactor's proposed hyperparameters (Shazeer & Stern 2018) and optax's bound below which factoring saves nothing.
FACTORED_EPSILON = 1e-30  # the paper's ε₁, added to squared gradients
FACTORED_DECAY_EXPONENT = 0.8  # second moments decay by 1 − t^−0.8
MIN_FACTORED_SIZE = 128
CLIP_THRESHOLD = 1.0  # the paper's d
MIN_PARAM_RMS = 1e-3  # the paper's ε₂

Blocks = Any  # a tree of `Block` in the structure of the weights


@dataclasses.dataclass(frozen=True)
class Block:
    """What the optimizer has to know about a weight in addition to its shape."""

    stacked: bool  # whether the first axis of the weight is the layers
    decay: bool  # whether weight decay applies
    # the array's elements divided by its real ones; the others are zero rows at the end; 1 for stacked weights
    padding: float
    matrix: Matrix | None = None  # inputs and outputs of a kernel in one layer; None for any other weight


def scale_by_trust_ratio(blocks: Blocks) -> optax.GradientTransformation:
    """Scales each layer's update u of weights w by ‖w‖ / ‖u‖, or by 1 where either norm is 0.

    This is algorithm 2 of You et al., with φ the identity. Zero padding adds nothing to a norm, so optax's transform is
    correct with it; this transform only separates layers.
    """
    transform = optax.scale_by_trust_ratio()

    def scale_one(update: jax.Array, weight: jax.Array) -> jax.Array:
        return transform.update(update, transform.init(weight), weight)[0]

    def scale(block: Block, update: jax.Array, weight: jax.Array) -> jax.Array:
        return jax.vmap(scale_one)(update, weight) if block.stacked else scale_one(update, weight)

    return optax.stateless(lambda updates, weights: jax.tree.map(scale, blocks, updates, weights))


def clip_by_block_rms(blocks: Blocks) -> optax.GradientTransformation:
    """Divides each layer's update u by max(1, RMS(u) / `CLIP_THRESHOLD`) (Shazeer & Stern, section 6)."""

    def clip(block: Block, update: jax.Array) -> jax.Array:
        return update / jnp.maximum(1, _rms(update, block) / CLIP_THRESHOLD)

    return optax.stateless(lambda updates, weights: jax.tree.map(clip, blocks, updates))


def scale_by_param_block_rms(blocks: Blocks) -> optax.GradientTransformation:
    """Multiplies each layer's update of weights w by max(`MIN_PARAM_RMS`, RMS(w)) (Shazeer & Stern, section 8)."""

    def scale(block: Block, update: jax.Array, weight: jax.Array) -> jax.Array:
        return update * jnp.maximum(MIN_PARAM_RMS, _rms(weight, block))

    return optax.stateless(lambda updates, weights: jax.tree.map(scale, blocks, updates, weights))


def scale_by_factored_rms(blocks: Blocks) -> optax.GradientTransformation:
    """Divides gradients g by the root of a running mean of g² + ε₁ that is stored factored where that saves memory.

    For a matrix, R and C are running means over its columns and rows, and the second moment of element (i, j) is
    R_i · C_j / mean(C) (Shazeer & Stern, algorithms 4 and 5).

    The state is `optax.FactoredState(count, v_row, v_col, v)`, whose trees have the structure of the weights. For a
    factored weight, `v_row` has the weight's shape without the second of its `factored_axes`, and `v_col` has it
    without the first. For any other weight, `v` has the weight's shape. Unused leaves are a zero of shape (1,).
    """
    # Blocks are looked up by path, not mapped along with the weights: `optax.tree.map_params` calls `init` with a
    # placeholder tree.
    by_path = dict(jax.tree.leaves_with_path(blocks))

    def init(weights: optax.Params) -> optax.FactoredState:
        def zeros(name: str) -> optax.Params:
            return jax.tree.map_with_path(
                lambda path, w: jnp.zeros(_moment_shapes(w.shape, by_path[path])[name], w.dtype), weights
            )

        return optax.FactoredState(jnp.zeros((), jnp.int32), zeros("v_row"), zeros("v_col"), zeros("v"))

    def update(
        grads: optax.Updates, state: optax.OptState, weights: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.FactoredState]:
        del weights
        count = state.count + 1
        decay = 1 - count.astype(jnp.float32) ** -FACTORED_DECAY_EXPONENT
        structure = jax.tree.structure(grads)
        trees = (blocks, grads, state.v_row, state.v_col, state.v)
        leaves = zip(*map(jax.tree.leaves, trees), strict=True)
        results = zip(*(_factored_update(*leaf, decay=decay) for leaf in leaves), strict=True)
        updates, v_row, v_col, v = (jax.tree.unflatten(structure, result) for result in results)
        return updates, optax.FactoredState(count, v_row, v_col, v)

    return optax.GradientTransformation(init, update)


def factored_axes(shape: tuple[int, ...], block: Block) -> tuple[int, int] | None:
    """Axes (rows, columns) of the stacked array over which second moments are factored; None when all are stored.

    They are the two largest axes of one layer, provided that both have at least `MIN_FACTORED_SIZE` real elements.
    Padding is not counted, because the number of vocabulary shards would then determine the algorithm.
    """
    sizes = [round(size / block.padding) if axis == 0 else size for axis, size in enumerate(shape)]
    largest = sorted(range(int(block.stacked), len(shape)), key=sizes.__getitem__)[-2:]
    if len(largest) < 2 or sizes[largest[0]] < MIN_FACTORED_SIZE:
        return None
    return min(largest), max(largest)


def _moment_shapes(shape: tuple[int, ...], block: Block) -> dict[str, tuple[int, ...]]:
    axes = factored_axes(shape, block)
    if axes is None:
        return {"v_row": (1,), "v_col": (1,), "v": shape}
    rows, columns = axes
    return {"v_row": _without(shape, columns), "v_col": _without(shape, rows), "v": (1,)}


def _factored_update(
    block: Block, grad: jax.Array, v_row: jax.Array, v_col: jax.Array, v: jax.Array, *, decay: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    square = jnp.square(grad)
    axes = factored_axes(grad.shape, block)
    if axes is None:
        v = decay * v + (1 - decay) * (square + FACTORED_EPSILON)
        return grad * lax.rsqrt(v), v_row, v_col, v
    rows, columns = axes
    v_row = decay * v_row + (1 - decay) * (square.mean(columns) + FACTORED_EPSILON)
    v_col = decay * v_col + (1 - decay) * (square.mean(rows) * block.padding + FACTORED_EPSILON)
    # v_row and v_col have the same mean except for padding rows, which only v_row has. Without the factor `padding`
    # this update would be the same, but a run resumed on a mesh with other padding would average values of different
    # scales.
    mean = v_col.mean(columns - 1, keepdims=True)
    # The roots are multiplied separately: in a row without gradient, v_row / mean could underflow.
    row_factor = jnp.expand_dims(lax.rsqrt(v_row), columns)
    col_factor = jnp.expand_dims(lax.rsqrt(v_col) * jnp.sqrt(mean), rows)
    return grad * row_factor * col_factor, v_row, v_col, v


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return shape[:axis] + shape[axis + 1 :]


def _rms(x: jax.Array, block: Block) -> jax.Array:
    axes = tuple(range(int(block.stacked), x.ndim))
    return jnp.sqrt(jnp.mean(jnp.square(x), axis=axes, keepdims=True) * block.padding)
