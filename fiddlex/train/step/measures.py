"""What a step measures of its gradients: their global norm, and where they are not finite."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from fiddlex.models.weights import Weights
from fiddlex.parallel.host_memory import is_on_host, map_rows
from fiddlex.schedules.placement import LayerPlacement


def measure(grads: Weights, placement: LayerPlacement, mesh: Mesh) -> tuple[jax.Array, Weights]:
    """The global norm of float32 gradients, and which of them have values that are not finite; for use under `jit`.

    A bool for every leaf, or under `layers`, which are stacked by `placement`, one per layer, says whether a value is
    infinite or not a number. Gradients of layers that are on the host are measured row by row.
    """
    if not any(map(is_on_host, jax.tree.leaves(grads))):
        found = {part: jax.tree.map(functools.partial(_nonfinite, placement, part), grads[part]) for part in grads}
        return optax.tree.norm(grads), found
    leaves, structure = jax.tree.flatten(grads["layers"])
    others = {part: grads[part] for part in grads if part != "layers"}
    total = optax.tree.norm((others, [g for g in leaves if not is_on_host(g)]), squared=True)
    flags = []
    for g in leaves:
        if is_on_host(g):
            squares, bad = _of_rows(g, mesh, after=total)
            total += squares.sum()
            flags.append(bad[jnp.asarray(placement.rows)])
        else:
            flags.append(_nonfinite(placement, "layers", g))
    found = {part: jax.tree.map(functools.partial(_nonfinite, placement, part), others[part]) for part in others}
    return jnp.sqrt(total), found | {"layers": jax.tree.unflatten(structure, flags)}


def _nonfinite(placement: LayerPlacement, part: str, g: jax.Array) -> jax.Array:
    if part != "layers":
        return jnp.any(~jnp.isfinite(g))
    return jnp.any(~jnp.isfinite(g), axis=tuple(range(1, g.ndim)))[jnp.asarray(placement.rows)]


def _of_rows(g: jax.Array, mesh: Mesh, *, after: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sum of squares of each row, float32 [row], and whether it has a value that is not finite, bool [row].

    On CPUs the loop over rows begins once the number `after` is known. XLA:CPU runs independent loops side by side, and
    devices that sum over one another in two of them at a time would wait for each other. XLA:GPU would take more memory
    for it.
    """
    pipe = mesh.shape["pipe"]
    number = len(g) // pipe

    def rule(changed: Any, row: jax.Array, other: Any) -> tuple[Any, Any]:
        index, squares, bad = other
        axes = tuple(range(1, row.ndim))
        squares = squares.at[:, index].set(jnp.square(row).sum(axes))
        return changed, (index + 1, squares, bad.at[:, index].set(jnp.any(~jnp.isfinite(row), axis=axes)))

    first = jnp.int32(0)
    if mesh.devices.flat[0].platform == "cpu":
        first = jnp.minimum(jnp.isnan(after).astype(jnp.int32), 0)  # 0, which XLA does not know
    start = first, jnp.zeros((pipe, number)), jnp.zeros((pipe, number), bool)
    _, (_, squares, bad) = map_rows(rule, (), g, start, mesh=mesh)
    return squares.reshape(-1), bad.reshape(-1)
