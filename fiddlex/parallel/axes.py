"""Logical axes: what each dimension of a weight is, and over which mesh axes it is sharded.

A parameter (`fiddlex.models.spec.Parameter`) names the logical axis of each of its dimensions;
`fiddlex.parallel.sharding` makes PartitionSpecs of `MESH_AXES` and `largest_dimension` for every weight, gradient and
moment.
"""

import math
from collections.abc import Sequence

from fiddlex.config import MeshConfig

LogicalAxes = tuple[str | None, ...]

MESH_AXES: dict[str, tuple[str, ...]] = {
    "layers": ("pipe",),
    "vocab": ("pipe", "tensor"),
    "heads": ("tensor",),
    "mlp": ("tensor",),
    "features": ("tensor",),  # a dimension of a Flax module's parameter of which each tensor rank has a part
    "hidden": (),
    "positions": (),
    "token_types": (),
    "classes": (),
}
REPLICAS = ("data",)  # axes over which every compute weight is whole, and its gradients are summed


def num_shards(axis: str | None, mesh: MeshConfig) -> int:
    """The number of equal parts into which a dimension is cut; `axis`: its logical axis, None if it is never cut."""
    return math.prod(getattr(mesh, name) for name in MESH_AXES[axis]) if axis else 1


def largest_dimension(shape: Sequence[int], parts: int) -> int | None:
    """The index of the largest dimension that can be cut into equal parts, along which ZeRO-1 shards a master weight.

    `shape` has the sizes before the cut. In a tie it is the lowest index; None when no size is a multiple of `parts`.
    """
    fitting = [i for i, size in enumerate(shape) if size % parts == 0]
    return max(fitting, key=shape.__getitem__, default=None)
