"""Every sharding of the program, as PartitionSpecs made from logical axes (`fiddlex.parallel.axes`).

Compute weights are whole on every `data` rank; master weights and optimizer state are sharded over `data` as well
(`zero_spec`; ZeRO stage 1, Rajbhandari et al., SC 2020).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fiddlex.config import MeshConfig
from fiddlex.parallel.axes import MESH_AXES, LogicalAxes, largest_dimension

BATCH = P("data")  # [example, ...]


def compute_spec(axes: LogicalAxes) -> P:
    """Sharding of a compute weight, and of its gradient before the reduction over `data`."""
    return P(*(MESH_AXES[axis] or None if axis else None for axis in axes))


def zero_spec(spec: P, shape: Sequence[int], config: MeshConfig) -> P:
    """`spec` with `data` added, after existing axes, to the largest dimension that `data` divides, if there is one."""
    if config.data == 1:
        return spec
    return _spread(spec, shape, ("data",), config.sizes)


def whole_rows_spec(spec: P, shape: Sequence[int], sizes: Mapping[str, int]) -> P:
    """`spec` with the first dimension whole; its mesh axes move to the largest other dimension that they divide.

    `spec` is that of an array with a row for each layer; `shape` may have another number of rows.
    """
    if not spec:
        return spec
    moved, rest = _names(spec[0]), P(*spec[1:])
    return P(None, *(_spread(rest, shape[1:], moved, sizes) if moved else rest))


def _spread(spec: P, shape: Sequence[int], axes: tuple[str, ...], sizes: Mapping[str, int]) -> P:
    """`spec` with `axes` added to the largest dimension that they divide, if there is one."""
    names = [_names(entry) for entry in (*spec, *[None] * (len(shape) - len(spec)))]
    local = [size // _product(sizes, present) for size, present in zip(shape, names, strict=True)]
    chosen = largest_dimension(local, _product(sizes, axes))
    if chosen is None:
        return spec
    names[chosen] = (*names[chosen], *axes)
    return P(*(present or None for present in names))


def zero_dimension(spec: P) -> int | None:
    """The dimension that `zero_spec` sharded over `data`, or None."""
    return next((i for i, entry in enumerate(spec) if "data" in _names(entry)), None)


def mesh_axes_of(spec: P) -> frozenset[str]:
    return frozenset(axis for entry in spec for axis in _names(entry))


def named(mesh: Mesh, specs: Any) -> Any:
    """A tree of PartitionSpecs as a tree of NamedShardings; NamedShardings among the leaves stay as they are."""

    def of(spec: P | NamedSharding) -> NamedSharding:
        return NamedSharding(mesh, spec) if isinstance(spec, P) else spec

    return jax.tree.map(of, specs, is_leaf=lambda x: isinstance(x, P))


def _names(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def _product(sizes: Mapping[str, int], axes: tuple[str, ...]) -> int:
    product = 1
    for axis in axes:
        product *= sizes[axis]
    return product


def on_devices(tree: Any, shardings: Any) -> Any:
    """Arrays of the host, the same in every process, as arrays of the devices, also of other processes' devices.

    `shardings` is one for all arrays, or a tree of shardings like `tree`.
    """
    if isinstance(shardings, NamedSharding):
        shardings = jax.tree.map(lambda _: shardings, tree)

    def placed(value: Any, sharding: NamedSharding) -> jax.Array:
        if sharding.is_fully_addressable:
            return jax.device_put(value, sharding)
        # `device_put` would compare the value with that of every other process.
        host = np.asarray(value)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(placed, tree, shardings)


def on_host(array: jax.Array) -> np.ndarray:
    """A copy of an array on every process's host, whichever devices hold its parts."""
    whole = array.is_fully_addressable or array.is_fully_replicated
    return np.array(array if whole else multihost_utils.process_allgather(array, tiled=True))
