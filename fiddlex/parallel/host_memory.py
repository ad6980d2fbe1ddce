"""Arrays in the memory of the host, and work on them for which one row after another comes to the devices.

A sharding says in which memory an array is (`memory_kind`), and jax's types say it too (`memory_space`). A program
moves values between the two memories by `jax.device_put`, while it goes on with other work. Stacked arrays
[rows, …], whose rows are sharded over `pipe`, therefore need to be on the devices only a row of each pipe rank at a
time.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

HOST = "pinned_host"  # the memory kind; devices read and write this memory without help of the host's processors

Tree = Any
# (a row of the changed arrays, of the arrays that are only read, all else) -> (new row of the changed arrays, all else)
Rule = Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]


def host_sharding(mesh: Mesh, spec: P) -> NamedSharding:
    """A sharding in the memory of the hosts of a mesh's devices."""
    sharding = NamedSharding(mesh, spec, memory_kind=HOST)
    if sharding.memory_kind is None:
        # Devices of a target do not tell their memories, for which jax drops the kind; an abstract mesh keeps it.
        return NamedSharding(mesh.abstract_mesh, spec, memory_kind=HOST)
    return sharding


def is_on_host(x: jax.Array) -> bool:
    """Whether an array, or in a program its type, is in the memory of the host."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def fetched(tree: Tree) -> Tree:
    """The arrays of a program on the devices."""
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device) if is_on_host(x) else x, tree)


def map_rows(rule: Rule, changed: Tree, read: Tree, other: Tree, *, mesh: Mesh) -> tuple[Tree, Tree]:
    """Applies a rule to one row after another of stacked arrays; for use under `jit` on global arrays.

    While the rule works on a row, the next one comes from the host, so that the devices hold two rows at most, and the
    results of a third.

    Args:
      rule: takes and returns rows [pipe, …], one of each pipe rank, on the devices.
      changed: arrays [rows, …] that the rule's results replace, each in the memory in which it is.
      read: arrays [rows, …] that the rule only reads.
      other: what the rule takes from row to row.
      mesh: the mesh; each pipe rank has as many rows as every other.

    Returns:
      The changed arrays, and `other` after the last row.
    """
    pipe = mesh.shape["pipe"]
    number = jax.tree.leaves(changed)[0].shape[0] // pipe
    # XLA:GPU copies a whole array of which a row is written while it reads another; so it reads first.
    reads_first = mesh.devices.flat[0].platform == "gpu"

    def row(x: jax.Array, index: Any) -> jax.Array:
        return lax.dynamic_index_in_dim(x.reshape(pipe, number, *x.shape[1:]), index, axis=1, keepdims=False)

    def rows(changed: Tree, index: Any) -> tuple[Tree, Tree]:
        return fetched(jax.tree.map(lambda x: row(x, index), (changed, read)))

    def written(x: jax.Array, new: jax.Array, index: Any) -> jax.Array:
        new = jax.device_put(new, jax.memory.Space.Host) if is_on_host(x) else new
        stacked = x.reshape(pipe, number, *x.shape[1:])
        return lax.dynamic_update_index_in_dim(stacked, new, index, axis=1).reshape(x.shape)

    def turn(index: Any, carry: tuple[Tree, Tree, tuple[Tree, Tree]]) -> tuple[Tree, Tree, tuple[Tree, Tree]]:
        changed, other, here = carry
        following = rows(changed, index + 1)
        new, other = rule(here[0], here[1], other)
        if reads_first:
            new, following = lax.optimization_barrier((new, following))
        return jax.tree.map(lambda x, new: written(x, new, index), changed, new), other, following

    changed, other, last = lax.fori_loop(0, number - 1, turn, (changed, other, rows(changed, 0)))
    new, other = rule(last[0], last[1], other)
    return jax.tree.map(lambda x, new: written(x, new, number - 1), changed, new), other
