"""What differs between two checkpoints: in what they say of themselves, and in the numbers of each array.

Rows of stacked weights are compared layer by layer, whatever the order in which two layouts keep them. An array whose
vocabulary is padded further than the other's is compared as if the other had zeros there. An array that is not what was
saved is named, so that nobody takes a fault for training. Invariant: an array is told to be equal only if each of its
numbers has the same bits in both, and both have the same dtype. Two arrays are held in memory at a time, and blocks of
them that are compared.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fiddlex.errors import CheckpointError
from fiddlex.schedules.placement import PADDING
from fiddlex.train.run.checkpoints.checksums import other_checksum
from fiddlex.train.run.checkpoints.meta import Meta, read_meta
from fiddlex.train.run.checkpoints.reading import first_line
from fiddlex.train.run.checkpoints.stored_arrays import StoredArrays

FIELDS = (
    "step",
    "layers",
    "fingerprint",
    "padded_vocab",
    "scaling",
    "usual",
    "switch",
    "older_dtype",
    "settings",
)  # of `meta`
_BLOCK = 2**20  # numbers that are compared at a time
Pairs = Iterator[tuple[np.ndarray, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class ArrayDifference:
    """How an array differs between two checkpoints."""

    name: str
    shapes: tuple[list[int], list[int]]  # in each of the two, as `dtypes`
    dtypes: tuple[str, str]
    num_elements: int  # that were compared; 0 when the shapes cannot be compared
    num_different: int = 0  # elements that have other bits, or another value where the dtypes differ
    max_absolute: float = 0.0  # the largest absolute difference; infinite where one number alone is not finite
    max_relative: float = 0.0  # the largest difference, divided by the larger of both absolute values

    @property
    def equal(self) -> bool:
        """Whether the array is the same in both, but for the order of rows and for padding."""
        return self.comparable and self.num_different == 0 and self.dtypes[0] == self.dtypes[1]

    @property
    def comparable(self) -> bool:
        """Whether the shapes differ at most in what they are padded to."""
        return self.num_elements > 0


@dataclasses.dataclass(frozen=True)
class Difference:
    """What differs between two checkpoints."""

    paths: tuple[Path, Path]
    meta: dict[str, tuple[Any, Any]]  # the two values of each field of `meta` that differs; None where one lacks it
    only: tuple[list[str], list[str]]  # names of the arrays that only the first has, and that only the second has
    arrays: list[ArrayDifference]  # those that both have, whether they differ or not
    damaged: tuple[dict[str, str], dict[str, str]]  # by name, what is wrong with these arrays of each of the two

    def facts(self) -> dict[str, Any]:
        """The difference as a JSON object."""
        arrays = [dataclasses.asdict(each) | {"equal": each.equal} for each in self.arrays]
        paths = list(map(str, self.paths))
        return {"paths": paths, "meta": self.meta, "only": self.only, "arrays": arrays, "damaged": self.damaged}


def difference(first: Path, second: Path, told: Callable[[str, int], None] = lambda what, size: None) -> Difference:
    """Compares the checkpoints in two folders; calls `told` after each array with its name and the bytes read."""
    metas = _meta(first), _meta(second)
    stored = [StoredArrays(path, meta) for path, meta in zip((first, second), metas, strict=True)]
    fields = {name: (metas[0].get(name), metas[1].get(name)) for name in FIELDS}
    names, others = (set(each.names) for each in stored)
    arrays: list[ArrayDifference] = []
    damaged: tuple[dict[str, str], dict[str, str]] = {}, {}
    for name in sorted(names & others):
        a, b = (_read(each, path, name) for each, path in zip(stored, (first, second), strict=True))
        for x, meta, found in zip((a, b), metas, damaged, strict=True):
            if reason := other_checksum(x, meta["checksums"][name]):
                found[name] = reason
        arrays.append(_compared(name, a, b, metas))
        told(name, a.nbytes + b.nbytes)
    differing = {name: values for name, values in fields.items() if values[0] != values[1]}
    return Difference((first, second), differing, (sorted(names - others), sorted(others - names)), arrays, damaged)


def _meta(path: Path) -> Meta:
    try:
        return read_meta(path)
    except (OSError, ValueError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {first_line(error)}. Compare another checkpoint.") from error


def _read(stored: StoredArrays, path: Path, name: str) -> np.ndarray:
    try:
        return stored.read(name)
    except Exception as error:  # tensorstore raises various errors for a damaged file
        raise CheckpointError(
            f"{path}: {name} cannot be read: {first_line(error)}. Run fiddlex checkpoint verify to see what is damaged."
        ) from error


def _compared(name: str, a: np.ndarray, b: np.ndarray, metas: tuple[Meta, Meta]) -> ArrayDifference:
    found = ArrayDifference(name, (list(a.shape), list(b.shape)), (a.dtype.name, b.dtype.name), 0)
    for x, y in _pairs(a, b, metas, stacked="layers" in name.split(".")):
        different = _differing(x, y)
        count = int(different.sum())
        absolute, relative = _sizes(x[different], y[different]) if count else (0.0, 0.0)
        found = dataclasses.replace(
            found,
            num_elements=found.num_elements + x.size,
            num_different=found.num_different + count,
            max_absolute=max(found.max_absolute, absolute),
            max_relative=max(found.max_relative, relative),
        )
    return found


def _pairs(a: np.ndarray, b: np.ndarray, metas: tuple[Meta, Meta], *, stacked: bool) -> Pairs:
    """Blocks of two arrays that belong together, flat and of one size; none when the shapes cannot be compared."""
    layers = metas[0]["layers"], metas[1]["layers"]
    if stacked and a.ndim and b.ndim and (len(a), len(b)) == tuple(map(len, layers)):
        rows = [{layer: row for row, layer in enumerate(each) if layer != PADDING} for each in layers]
        if rows[0].keys() == rows[1].keys():
            for layer in sorted(rows[0]):
                yield from _padded_pairs(a[rows[0][layer]], b[rows[1][layer]], metas)
    else:
        yield from _padded_pairs(a, b, metas)


def _padded_pairs(a: np.ndarray, b: np.ndarray, metas: tuple[Meta, Meta]) -> Pairs:
    padded = metas[0].get("padded_vocab", 0), metas[1].get("padded_vocab", 0)
    shapes = a.shape, b.shape
    if a.ndim != b.ndim or any(x != y and (x, y) != padded for x, y in zip(a.shape, b.shape, strict=True)):
        return
    if a.shape != b.shape:
        a, b = _filled(a, b.shape), _filled(b, a.shape)
        for axis, size in enumerate(map(min, *shapes)):
            for x in (a, b):
                padding = x[(slice(None),) * axis + (slice(size, None),)]
                padding[padding == 0] = 0  # either zero
    a, b = np.ascontiguousarray(a).reshape(-1), np.ascontiguousarray(b).reshape(-1)
    for start in range(0, a.size, _BLOCK):
        yield a[start : start + _BLOCK], b[start : start + _BLOCK]


def _filled(x: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """`x` with zeros after the end of each axis that is shorter than in `shape`."""
    more = [(0, max(0, want - has)) for has, want in zip(x.shape, shape, strict=True)]
    return np.pad(x, more) if any(after for _, after in more) else x


def _differing(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Where the bits differ; where the values do if the dtypes differ."""
    if x.dtype != y.dtype:
        different: np.ndarray = x.astype(np.float64) != y.astype(np.float64)
        return different
    bits = np.dtype(f"u{x.dtype.itemsize}")
    return np.not_equal(x.view(bits), y.view(bits))


def _sizes(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """The largest absolute and the largest relative difference."""
    a, b = x.astype(np.float64), y.astype(np.float64)
    known = np.isfinite(a) & np.isfinite(b)
    with np.errstate(invalid="ignore", over="ignore"):
        absolute = np.where(known, np.abs(a - b), np.inf)
        largest = np.maximum(np.abs(a), np.abs(b))
        relative = np.where(known, np.divide(absolute, largest, where=largest > 0, out=np.zeros_like(a)), np.inf)
    return float(absolute.max()), float(relative.max())
