"""Reads the arrays of a checkpoint one by one into this process's memory: without a mesh, a config or an accelerator.

Orbax writes an item as zarr arrays in an OCDBT database, under the arrays' names; tensorstore, by which orbax reads
them, opens them here too. Invariant: no memory is reserved for an array before its shape is known to be the saved one,
and only one array is read at a time.
"""

from pathlib import Path

import numpy as np
import tensorstore

from fiddlex.train.run.checkpoints.meta import Meta


class StoredArrays:
    """The arrays of the checkpoint in a folder, by their full names; `meta` is what it says of itself (`read_meta`).

    The methods raise ValueError for an array that is not there, cannot be decoded, or has another shape than the saved
    one.
    """

    def __init__(self, path: Path, meta: Meta):
        self._path, self._shapes = path, meta.get("shapes", {})  # earlier versions of fiddlex saved none
        self.names: list[str] = sorted(meta["checksums"])

    def dtype(self, name: str) -> np.dtype:
        """The dtype of an array; reads no number."""
        return self._open(name).dtype.numpy_dtype

    def read(self, name: str) -> np.ndarray:
        found: np.ndarray = self._open(name).read().result()
        return found

    def _open(self, name: str) -> tensorstore.TensorStore:
        item, _, key = name.partition(".")
        base = {"driver": "file", "path": f"{self._path / item}/"}
        spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{key}/"}}
        array = tensorstore.open(spec, open=True, read=True).result()
        shape = tuple(self._shapes.get(name, array.shape))
        if array.shape != shape:
            raise ValueError(f"its shape is {array.shape}, and {shape} was saved")
        return array
