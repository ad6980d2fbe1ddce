"""Arrays in the memory of the host, and work on them for which one row after another comes to the devices.

A program moves values between the two memories by `jax.device_put`, while it goes on with other work. Stacked arrays
[rows, …], whose rows are sharded over `pipe`, therefore need to be on the devices only a row of each pipe rank at a
time.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fiddlex.parallel.sharding import mesh_axes_of

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
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def fetched(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device) if is_on_host(x) else x, tree)


def put_like(new: jax.Array, old: jax.Array) -> jax.Array:
    """A program's array `new` in the memory in which `old` is."""
    return jax.device_put(new, jax.memory.Space.Host) if is_on_host(old) else new


def empty(shape: Sequence[int], dtype: jnp.dtype, mesh: Mesh, spec: P) -> jax.Array:
    """An array in the memory of the hosts whose values are whatever is in memory; for use under `jit`."""

    def part() -> jax.Array:
        array = lax.empty(NamedSharding(mesh, spec).shard_shape(tuple(shape)), dtype)
        return jax.device_put(lax.pcast(array, tuple(mesh_axes_of(spec)), to="varying"), jax.memory.Space.Host)

    # Each device makes its own part: XLA:GPU would make an array of the whole mesh on the devices first.
    return jax.shard_map(part, mesh=mesh, in_specs=(), out_specs=spec)()


def map_whole(rule: Rule, changed: Tree, read: Tree, other: Tree) -> tuple[Tree, Tree]:
    """Applies a rule once to whole arrays; see `map_rows`."""

    def turn(index: Any, carry: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
        del index
        changed, other = carry
        own, given = fetched((changed, read))
        new, other = rule(own, given, other)
        return jax.tree.map(put_like, new, changed), other

    # XLA does not know that the loop has one turn. From outside a loop it would fetch the arrays as early as it can,
    # and the devices would hold them beside all that is between.
    one = lax.optimization_barrier(jnp.int32(1))
    with jax.named_scope("map_whole"):
        return lax.fori_loop(0, one, turn, (changed, other))


def map_rows(rule: Rule, changed: Tree, read: Tree, other: Tree, *, mesh: Mesh) -> tuple[Tree, Tree]:
    """Applies a rule to one row after another of stacked arrays; for use under `jit` on global arrays.

    While the rule works on a row, the next one comes from the host: devices hold two rows, and the results of a third.

    Args:
      rule: takes and returns rows [pipe, …], one of each pipe rank, on the devices.
      changed: arrays [rows, …] that the rule's results replace, each in the memory in which it is.
      read: arrays [rows, …] that the rule only reads.
      other: what the rule takes from row to row.
      mesh: each of its pipe ranks has as many rows as every other.

    Returns:
      The changed arrays, and `other` after the last row.
    """
    pipe = mesh.shape["pipe"]
    number = jax.tree.leaves((changed, read))[0].shape[0] // pipe
    if number == 1:
        return map_whole(rule, changed, read, other)
    # XLA:GPU copies a whole array of which a row is written while it reads another; so it reads first.
    reads_first = mesh.devices.flat[0].platform == "gpu"

    def stacked(x: jax.Array) -> jax.Array:
        return x.reshape(pipe, number, *x.shape[1:])

    def rows(tree: Tree, index: Any) -> Tree:
        return fetched(jax.tree.map(lambda x: lax.dynamic_index_in_dim(stacked(x), index, 1, keepdims=False), tree))

    def written(tree: Tree, new: Tree, index: Any) -> Tree:
        def write(x: jax.Array, row: jax.Array) -> jax.Array:
            return lax.dynamic_update_index_in_dim(stacked(x), put_like(row, x), index, axis=1).reshape(x.shape)

        return jax.tree.map(write, tree, new)

    def turn(index: Any, carry: tuple[Tree, Tree, Tree]) -> tuple[Tree, Tree, Tree]:
        changed, other, (own, given) = carry
        following = rows((changed, read), index + 1)
        new, other = rule(own, given, other)
        if reads_first:
            new, following = lax.optimization_barrier((new, following))
        return written(changed, new, index), other, following

    first = rows((changed, read), 0)
    changed, other, (own, given) = lax.fori_loop(0, number - 1, turn, (changed, other, first))
    new, other = rule(own, given, other)
    return written(changed, new, number - 1), other
