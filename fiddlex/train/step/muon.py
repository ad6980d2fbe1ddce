"""Muon for the matrices of layers, which are stacked by layer and sharded over devices.

Muon (Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024) moves a matrix by its momentum with
all singular values made about 1, by five Newton–Schulz iterations. The step of an r × c matrix is multiplied by
0.2 √max(r, c), so that its elements are about as large as those of AdamW's steps, and both rules can share a learning
rate and a weight decay (Liu et al., Muon is Scalable for LLM Training, arXiv:2502.16982, section 2.2).

Invariant: each matrix of each layer, queries, keys and values apart, changes as under `optax.contrib.muon` on that
matrix alone. The iterations need whole matrices, which tensor parallelism and ZeRO-1 cut. Therefore the matrices of a
pipe rank are divided among its devices, each device iterates on its own, and the results go back to the shards of the
master weights.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fiddlex.models.spec import Matrix
from fiddlex.train.step.blockwise import Blocks

MATCHED_RMS = 0.2  # root mean square of the elements of a step at learning rate 1, as AdamW's typically have

# A function of matrices [layer, matrix, row, column] to matrices of the same shape, each from the one at its place.
Rule = Callable[[jax.Array], jax.Array]
Deal = Callable[[Rule, jax.Array], jax.Array]  # applies a rule on devices that hold whole matrices


class MomentumState(NamedTuple):
    """State of `nesterov_momentum`."""

    updates: jax.Array  # int32, number of updates done
    mu: optax.Updates  # the mean of gradients, in the structure and shapes of the weights


def nesterov_momentum(decay: float) -> optax.GradientTransformation:
    """Nesterov's momentum of gradients, with Adam's correction of the bias towards the initial zero.

    With β = `decay` and mean m ← βm + (1 − β)g after t updates, the direction is
    β m / (1 − β^(t+1)) + (1 − β) g / (1 − β^t) (Dozat, Incorporating Nesterov Momentum into Adam, ICLR 2016 workshop),
    as in `optax.contrib.scale_by_muon`.
    """

    def init(weights: optax.Params) -> MomentumState:
        return MomentumState(jnp.zeros((), jnp.int32), optax.tree.zeros_like(weights))

    def update(
        grads: optax.Updates, state: optax.OptState, weights: optax.Params | None = None
    ) -> tuple[optax.Updates, MomentumState]:
        del weights
        assert isinstance(state, MomentumState)
        count = state.updates + 1
        mu = optax.tree.update_moment(grads, state.mu, decay, 1)
        ahead = optax.tree.bias_correction(mu, decay, count + 1)
        now = optax.tree.bias_correction(grads, decay, count)
        direction = jax.tree.map(lambda m, g: decay * m + (1 - decay) * g, ahead, now)
        return direction, MomentumState(count, mu)

    return optax.GradientTransformation(init, update)


def orthogonalize(blocks: Blocks, deal: Deal) -> optax.GradientTransformation:
    """Replaces every matrix by an almost orthogonal one with the same singular vectors, scaled as the module says."""
    iterate = optax.contrib.scale_by_muon(
        beta=0.0, nesterov=False, weight_dimension_numbers=optax.contrib.MuonDimensionNumbers(-2, -1)
    )
    # Blocks are looked up by path: `optax.partition` masks the other weights, which `blocks` still has.
    by_path = dict(jax.tree.leaves_with_path(blocks))

    def one(path: jax.tree_util.KeyPath, update: jax.Array) -> jax.Array:
        matrix = by_path[path].matrix  # which every weight given to the transform has
        matrices = as_matrices(update, matrix)
        scale = MATCHED_RMS * math.sqrt(max(matrices.shape[-2:]))
        matrices = deal(lambda x: scale * iterate.update(x, iterate.init(x))[0], matrices)
        return from_matrices(matrices, matrix, update.shape)

    return optax.stateless(lambda updates, weights: jax.tree.map_with_path(one, updates))


def as_matrices(x: jax.Array, matrix: Matrix) -> jax.Array:
    """The matrices of a stacked kernel [layer, …], as [layer, matrix, row, column]."""
    order = _order(x.ndim, matrix)
    return x.transpose(0, *sum(order, ())).reshape(
        x.shape[0], *(math.prod(x.shape[axis] for axis in axes) for axes in order)
    )


def from_matrices(x: jax.Array, matrix: Matrix, shape: tuple[int, ...]) -> jax.Array:
    """The stacked kernel of this shape whose matrices `as_matrices` returned."""
    axes = (0, *sum(_order(len(shape), matrix), ()))
    back = sorted(range(len(shape)), key=axes.__getitem__)
    return x.reshape([shape[axis] for axis in axes]).transpose(back)


def deal_over(mesh: Mesh, *, zero1: bool) -> Deal:
    """Returns the function that applies a rule to matrices divided among the devices of their pipe rank.

    Without ZeRO-1, every data-parallel replica has all of the optimizer state, and applies the rule to all matrices.
    """
    axes = ("data", "tensor") if zero1 else ("tensor",)
    pipe, devices = mesh.shape["pipe"], math.prod(mesh.shape[axis] for axis in axes)
    if devices == 1:
        return lambda rule, x: rule(x)

    def deal(rule: Rule, x: jax.Array) -> jax.Array:
        number = math.prod(x.shape[:2]) // pipe
        dealt = jnp.pad(x.reshape(pipe, number, *x.shape[2:]), [(0, 0), (0, -number % devices), (0, 0), (0, 0)])
        sharding = NamedSharding(mesh, P("pipe", axes))
        dealt = lax.with_sharding_constraint(rule(lax.with_sharding_constraint(dealt, sharding)), sharding)
        return dealt[:, :number].reshape(x.shape)

    return deal


def _order(ndim: int, matrix: Matrix) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The axes of a stacked kernel that number its matrices, and those of their rows and columns."""
    rows, columns = (tuple(1 + axis for axis in axes) for axes in (matrix.inputs, matrix.outputs))
    return tuple(axis for axis in range(1, ndim) if axis not in rows + columns), rows, columns
