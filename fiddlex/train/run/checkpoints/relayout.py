"""Moves a train state to another pipeline layout: reorders the rows of stacked layers for the new placement.

Weights, and every part of the optimizer state that mirrors them, have a row for each layer. The order of the rows
depends on the schedule's placement (`fiddlex.schedules.placement`), and a checkpoint records the order in which it was
saved. Invariant: moving rows changes no number, and padding rows are zero before and after.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from fiddlex.parallel.host_memory import fetched, is_on_host
from fiddlex.parallel.sharding import whole_rows_spec
from fiddlex.schedules.placement import PADDING

Tree = Any


def saved_form(abstract: Tree, layers: Sequence[int], saved_layers: Sequence[int]) -> Tree:
    """ShapeDtypeStructs of what to read from a checkpoint whose rows are in another order than those of `abstract`.

    `layers` and `saved_layers` are the layers of the rows (`LayerPlacement.layers`). The row axis is not sharded; its
    mesh axes move to another axis where possible. Raises ValueError when `saved_layers`, which come from a file, lack a
    layer of the state or are no layers.
    """
    is_known = isinstance(saved_layers, list | tuple) and all(type(layer) is int for layer in saved_layers)
    if not is_known or not {*layers} - {PADDING} <= {*saved_layers}:
        raise ValueError(
            f"it tells of rows for the layers {saved_layers!r:.100}, and the state has {list(layers)!r:.100}"
        )

    def saved(path: Any, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if not _has_rows(path, x, layers):
            return x
        assert isinstance(x.sharding, NamedSharding)
        shape, mesh = (len(saved_layers), *x.shape[1:]), x.sharding.mesh
        spec = whole_rows_spec(x.sharding.spec, shape, mesh.shape)
        return jax.ShapeDtypeStruct(
            shape, x.dtype, sharding=NamedSharding(mesh, spec, memory_kind=x.sharding.memory_kind)
        )

    return jax.tree.map_with_path(saved, abstract)


def move_rows(state: Tree, abstract: Tree, layers: Sequence[int], saved_layers: Sequence[int]) -> Tree:
    """Converts a state that was read in `saved_form` to the rows and shardings of `abstract`."""
    sources = {layer: row for row, layer in enumerate(saved_layers)}
    rows = np.asarray([0 if layer == PADDING else sources[layer] for layer in layers])
    real = np.asarray(layers) != PADDING

    def moved(path: Any, x: jax.Array, target: jax.ShapeDtypeStruct) -> jax.Array:
        if not _has_rows(path, target, layers):
            return x
        return jnp.where(real.reshape(-1, *[1] * (x.ndim - 1)), fetched(x)[rows], 0)

    def move(path: Any, x: jax.Array, target: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.jit(functools.partial(moved, path, target=target), out_shardings=target.sharding)(x)

    if any(map(is_on_host, jax.tree.leaves(state))):  # the devices may not have room for all of it
        return jax.tree.map_with_path(move, state, abstract)
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    return jax.jit(lambda state: jax.tree.map_with_path(moved, state, abstract), out_shardings=shardings)(state)


def _has_rows(path: Any, x: Any, layers: Sequence[int]) -> bool:
    return any(getattr(key, "key", None) == "layers" for key in path) and x.shape[:1] == (len(layers),)
