"""The collectives inside `shard_map`: the two of tensor parallelism, and the reduction of gradients.

Varying-axes types (`check_vma=True`) replace Megatron's f and g operators: the transpose of the reduction after a
row-parallel product is the identity, and the transpose of a replicated activation's entry into a column-parallel
product is one reduction. With sequence parallelism (Korthikanti et al., MLSys 2023, section 4.2.2) the pair is
all-gather and reduce-scatter along the sequence instead; both pairs send the same number of bytes.

Activations outside attention and MLP are `x_BSH`, or with sequence parallelism `x_BTH` with T = S / tensor.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from fiddlex.parallel.sharding import mesh_axes_of, zero_dimension

SEQUENCE_DIMENSION = 1


def enter_tensor_parallel(x_BTH: jax.Array, *, sequence_parallel: bool) -> jax.Array:
    """Prepares activations for a column-parallel product: whole sequences on every tensor rank, varying over `tensor`.

    The transpose sums gradients over `tensor`: for `pcast` it is all-reduce, for all-gather reduce-scatter.
    """
    if not sequence_parallel:
        return lax.pcast(x_BTH, "tensor", to="varying")
    return lax.all_gather(x_BTH, "tensor", axis=SEQUENCE_DIMENSION, tiled=True)


def leave_tensor_parallel(partial_BSH: jax.Array, *, sequence_parallel: bool) -> jax.Array:
    """Sums a row-parallel product's partial results; with sequence parallelism a rank keeps its part of the sum."""
    if not sequence_parallel:
        return lax.psum(partial_BSH, "tensor")
    return lax.psum_scatter(partial_BSH, "tensor", scatter_dimension=SEQUENCE_DIMENSION, tiled=True)


@jax.custom_vjp
def own_positions(x_BSH: jax.Array) -> jax.Array:
    """A tensor rank's part of activations that all ranks have whole, and of which all compute the whole gradient."""
    length = x_BSH.shape[SEQUENCE_DIMENSION] // lax.axis_size("tensor")
    first = lax.axis_index("tensor") * length
    x_BSH = as_varying_over(x_BSH, frozenset({"tensor"}))
    return lax.dynamic_slice_in_dim(x_BSH, first, length, axis=SEQUENCE_DIMENSION)


@jax.custom_vjp
def all_positions(x_BTH: jax.Array) -> jax.Array:
    """The inverse of `own_positions`."""
    return lax.all_gather(x_BTH, "tensor", axis=SEQUENCE_DIMENSION, tiled=True, to="invarying")


own_positions.defvjp(lambda x_BSH: (own_positions(x_BSH), None), lambda _, dy_BTH: (all_positions(dy_BTH),))
all_positions.defvjp(lambda x_BTH: (all_positions(x_BTH), None), lambda _, dy_BSH: (own_positions(dy_BSH),))


def first_position(length: int, axes: tuple[str, ...]) -> jax.Array | int:
    """The place in the whole sequence of the first of the `length` positions that a rank has of activations."""
    if not axes:
        return 0
    return lax.axis_index(axes[0] if len(axes) == 1 else axes) * length  # a tuple of one axis adds operations


def take_positions(x_BTH: jax.Array, positions_BP: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Takes some positions of each sequence, int32 in the whole sequence, on every tensor rank; returns [B, P, H].

    With sequence parallelism the ranks exchange only these positions. The result then varies over `tensor`, as do the
    weights that multiply it (`as_varying`).
    """
    if not axes:
        return jnp.take_along_axis(x_BTH, positions_BP[..., None], axis=SEQUENCE_DIMENSION)
    length = x_BTH.shape[SEQUENCE_DIMENSION]
    local_BP = positions_BP - first_position(length, axes)
    mine_BP1 = ((local_BP >= 0) & (local_BP < length))[..., None]
    rows_BPH = jnp.take_along_axis(x_BTH, jnp.where(mine_BP1, local_BP[..., None], 0), axis=SEQUENCE_DIMENSION)
    return lax.pcast(lax.psum(jnp.where(mine_BP1, rows_BPH, 0), axes), axes, to="varying")


def axes_of(x: jax.Array) -> frozenset[str]:
    """The mesh axes over which an array varies."""
    axes: frozenset[str] = jax.typeof(x).manual_axis_type.varying
    return axes


def as_varying_over(x: Any, axes: frozenset[str]) -> Any:
    """The array, marked as varying over further axes."""
    missing = tuple(sorted(axes - axes_of(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def as_varying(tree: Any, specs: Any, axes: Any) -> Any:
    """Marks each weight as varying over those of its `axes`, a tree of frozensets, on which it is replicated.

    Without the mark, autodiff would sum its gradient over the axis at every use, in every microbatch. With it, the
    gradient stays a per-device partial sum, which `reduce_gradients` sums once per batch.
    """

    def cast(x: jax.Array, spec: P, axes: frozenset[str]) -> jax.Array:
        replicated = tuple(sorted(axes - mesh_axes_of(spec)))
        return lax.pcast(x, replicated, to="varying") if replicated else x

    return jax.tree.map(cast, tree, specs, axes)


def reduce_gradients(grads: Any, specs: Any, zero_specs: Any, axes: Any) -> Any:
    """Sums each partial gradient over those of its `axes`, a tree of frozensets, on which the weight is replicated.

    To be called once per batch. Over `data` the sum is a reduce-scatter onto the rank's shard by `zero_spec`.
    """

    def reduce(g: jax.Array, spec: P, zero: P, axes: frozenset[str]) -> jax.Array:
        replicated = axes - mesh_axes_of(spec)
        dimension = zero_dimension(zero)
        if "data" in replicated and dimension is not None:
            g = lax.psum_scatter(g, "data", scatter_dimension=dimension, tiled=True)
            replicated -= {"data"}
        return lax.psum(g, tuple(sorted(replicated))) if replicated else g

    return jax.tree.map(reduce, grads, specs, zero_specs, axes)
