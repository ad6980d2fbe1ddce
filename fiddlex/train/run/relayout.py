"""Train states on another layout of the pipe: the rows of stacked layers moved to where the new placement wants them.

Weights and every part of the optimizer's state that mirrors them have a row for each layer, in an order that depends on
the schedule's placement (`fiddlex.schedules.placement`). A checkpoint says which order it was saved in. Invariant:
moving rows changes no number, and padding rows are zero on both sides.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from fiddlex.parallel.sharding import whole_rows_spec
from fiddlex.schedules.placement import PADDING

Tree = Any


def saved_form(abstract: Tree, layers: Sequence[int], saved_layers: Sequence[int]) -> Tree:
    """What to read from a checkpoint, for a state that will have other rows.

    Args:
      abstract: ShapeDtypeStructs with shardings of that state.
      layers: the layer of each of its rows (`LayerPlacement.layers`).
      saved_layers: the layer of each row in the checkpoint.

    Returns:
      ShapeDtypeStructs of the saved shapes, with rows whole and still sharded where that can be.
    """

    def saved(path: Any, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if not _has_rows(path, x, layers):
            return x
        assert isinstance(x.sharding, NamedSharding)
        shape, mesh = (len(saved_layers), *x.shape[1:]), x.sharding.mesh
        spec = whole_rows_spec(x.sharding.spec, shape, mesh.shape)
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map_with_path(saved, abstract)


def move_rows(state: Tree, abstract: Tree, layers: Sequence[int], saved_layers: Sequence[int]) -> Tree:
    """A state as it was read in `saved_form`, with the rows and shardings of `abstract`."""
    sources = {layer: row for row, layer in enumerate(saved_layers)}
    rows = np.asarray([0 if layer == PADDING else sources[layer] for layer in layers])
    real = np.asarray(layers) != PADDING

    def moved(path: Any, x: jax.Array, target: jax.ShapeDtypeStruct) -> jax.Array:
        if not _has_rows(path, target, layers):
            return x
        return jnp.where(real.reshape(-1, *[1] * (x.ndim - 1)), x[rows], 0)

    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    move = jax.jit(lambda state: jax.tree.map_with_path(moved, state, abstract), out_shardings=shardings)
    return move(state)


def _has_rows(path: Any, x: Any, layers: Sequence[int]) -> bool:
    return any(getattr(key, "key", None) == "layers" for key in path) and x.shape[:1] == (len(layers),)
