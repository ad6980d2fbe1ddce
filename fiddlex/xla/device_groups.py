"""Parses the groups of devices that take part in a collective, in the forms that XLA prints.

A device is the number of its partition in the program. The numbers count places in the mesh, the last axis varying
fastest. Several slices of TPUs run a program each, whose numbers count the places of its slice (`Places.of_program`);
what such programs send to each other has forms of its own (`Places.between_slices`).
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

Groups = Sequence[Sequence[int]]

_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")  # {{0,1},{1,0}}
_LIST = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")  # {{0,1},{2,3}}
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)")  # [2,2]<=[4]
_AXES = re.compile(  # mesh['a'=2,'b'=2] {'b'}
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((\[[\d,]+\](?:T\([\d,]+\))?|[\d,]+)\))? \{([^}]*)\}"
)
_SLICES = re.compile(r'_xla_megascale_target="\{([\d,]+)\}x\{(\d+):(\d+)\}"')  # "{1,2}x{0:7}"
_IDS = re.compile(r"_xla_megascale_target=\{((?:\{\d+(?:(?:,|->)\d+)*\},?)*)\}")  # {{1->2}} or {{1,2}}, of ids
_AXIS = re.compile(r"'([^':]+)'?(?::\((\d+)\)(\d+))?")


@dataclasses.dataclass(frozen=True)
class Places:
    """The places of a mesh, in its order, and where their devices are."""

    sizes: Mapping[str, int]  # sizes of the mesh axes, the last varying fastest over the places
    granules: Sequence[int]  # each place's slice or host, as numbered by `fiddlex.cluster.mesh.granules`
    ids: Sequence[int]  # id of each place's device

    def of_program(self, num_partitions: int) -> list[int]:
        """The places of a program's devices, by partition: all, or those of the first slice if a slice fills it."""
        places = list(range(len(self.granules)))
        if num_partitions == len(places):
            return places
        return [place for place in places if self.granules[place] == min(self.granules)]

    def between_slices(self, attributes: str) -> Groups | None:
        """The groups of places that a program of several slices exchanges data with, from the attributes of a `send`.

        Groups of equal size, or the pairs of a permute; None where the text has none of the known forms.
        """
        if found := _SLICES.search(attributes):
            numbers = sorted(set(self.granules))
            slices = [numbers[number - 1] for number in _numbers(found[1])]
            of_slice = [[place for place, at in enumerate(self.granules) if at == number] for number in slices]
            return [list(group) for group in zip(*of_slice, strict=True)][int(found[2]) : int(found[3]) + 1]
        if found := _IDS.search(attributes):
            place = {number: at for at, number in enumerate(self.ids)}
            return [[place[number] for number in group] for group in _tuples(found[1].replace("->", ","))]
        return None

    def crossing_bytes(self, kind: str, size: int, groups: Groups) -> np.ndarray:
        """Bytes that each place sends to other slices or hosts, as an array over the places.

        Each slice or host first reduces what its devices have, or gathers afterwards, so that its n devices send an
        n-th each. In a permute the first place of a pair sends all. `size` counts bytes as `Collective.bytes` does.
        """
        sent = np.zeros(len(self.granules))
        for group in groups:
            across = len({self.granules[place] for place in group})
            if kind == "collective-permute":
                sent[group[0]] += size * (across > 1)
            else:
                reduced_inside = kind in ("all-reduce", "all-gather", "reduce-scatter")
                part = size * across / len(group) if reduced_inside else size
                sent[list(group)] += (2 if kind == "all-reduce" else 1) * part * (across - 1) / across
        return sent


def groups_of(attributes: str, num_devices: int) -> Groups | None:
    """The groups of devices that exchange data, of equal size; None where the text has none of the known forms.

    Of a permute they are the pairs of different devices, or one device where there are none. An instruction that names
    no groups has one, of all `num_devices` devices of the program.
    """
    if pairs := _PAIRS.search(attributes):
        return [pair for pair in _tuples(pairs[1]) if pair[0] != pair[1]] or [[0]]
    if explicit := _LIST.search(attributes):
        return _tuples(explicit[1]) or [list(range(num_devices))]
    if iota := _IOTA.search(attributes):
        return _ordered(iota[3]).reshape(int(iota[1]), int(iota[2])).tolist()
    if axes := _AXES.search(attributes):
        return _along(*axes.groups())
    return None


def axis_of(groups: Groups, mesh: Mapping[str, int]) -> str:
    """The mesh axis along which the devices of each group differ; `several` unless there is exactly one."""
    places = np.stack(np.unravel_index(np.asarray(groups), tuple(mesh.values())))
    differ = (np.ptp(places, axis=2) > 0).any(axis=1)
    names = [name for name, differs in zip(mesh, differ, strict=True) if differs]
    return names[0] if len(names) == 1 else "several"


def _along(sizes: str, order: str | None, chosen: str) -> Groups | None:
    """The groups along axes of a mesh that XLA itself defines.

    `sizes` are those of all its axes: 'a'=2,'b'=4. `order` is that of its devices; None: 0, 1, …. The groups run along
    the axes `chosen`: 'a'; or a part of an axis: 'b':(1)2 is the outer half of b, where the number in parentheses is
    the size of the factor of the axis that lies outside that part.
    """
    found = _AXIS.findall(chosen)
    parts = {name: (before, size) for name, before, size in found}
    if len(parts) < len(found):  # two parts of one axis
        return None
    dims: list[int] = []
    along: list[int] = []
    for name, text in re.findall(r"'([^']+)'=(\d+)", sizes):
        before, size = parts.get(name, ("", ""))
        if name in parts:
            along.append(len(dims) + bool(before))
        dims += [int(before), int(size), int(text) // (int(before) * int(size))] if before else [int(text)]
    ids = (_ordered(order) if order else np.arange(math.prod(dims))).reshape(dims)
    group_size = math.prod(dims[axis] for axis in along)
    return np.moveaxis(ids, along, range(-len(along), 0)).reshape(-1, group_size).tolist()


def _ordered(text: str) -> np.ndarray:
    """Parses XLA's device lists: [2,4]T(1,0), which is 0 to 7 in two rows, transposed; or 0,4,1,5."""
    if not text.startswith("["):
        return np.asarray(_numbers(text))
    shape, _, order = text.strip("[)").partition("]")
    ids = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    return ids.transpose(_numbers(order.removeprefix("T("))) if order else ids


def _tuples(text: str) -> list[list[int]]:
    return [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", text)]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]
