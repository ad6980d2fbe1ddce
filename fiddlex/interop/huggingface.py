"""Weights from and to a folder of Hugging Face's transformers, one tensor at a time, in any layout.

Reading fills each device's shard from the mapped files; writing takes each tensor from the devices when its turn comes.
So the host never holds the whole model beside the arrays of the mesh.
"""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fiddlex.config import Config
from fiddlex.errors import CheckpointError
from fiddlex.interop.architecture import Architecture
from fiddlex.interop.architectures import architecture_of, config_json
from fiddlex.interop.folder import described, read_json
from fiddlex.interop.matching import Wanted, matched
from fiddlex.interop.safetensors_files import Tensor, TensorFolder, write_folder
from fiddlex.models.model import Model
from fiddlex.models.weights import Weights


def wanted_tensors(architecture: Architecture, model: Model) -> list[Wanted]:
    """The tensors that make up the weights of a model, in the order in which transformers' classes have them."""
    found: list[Wanted] = []
    for part in architecture.parts(model.config):
        parameter: Any = model.network.parts
        for key in part.path:
            parameter = parameter[key]
        layers = range(model.config.num_layers) if part.path[0] == "layers" else (None,)
        found += [Wanted(part, layer, parameter) for layer in layers]
    return found


class FolderWeights:
    """The weights of a folder, whose `config.json` describes the model; read from the mapped files when asked for.

    Raises:
      CheckpointError: when tensors are missing, left over, of another shape or not of a floating-point dtype, or two
        that must be equal differ; the message names them.
    """

    def __init__(self, folder: Path, model: Model):
        architecture = architecture_of(described(folder))
        self._folder = folder
        self._tensors, wanted = TensorFolder(folder), wanted_tensors(architecture, model)
        self._names = matched(folder, self._tensors, architecture, wanted)
        self._parts: dict[tuple[tuple[str, ...], int | None], list[Wanted]] = {}
        for each in wanted:
            self._parts.setdefault((each.part.path, each.layer), []).append(each)

    def read(self, shapes: Weights, shardings: Weights, layers: tuple[int, ...]) -> Weights:
        """Master weights, float32, sharded and padded as asked for.

        Args:
          shapes: ShapeDtypeStructs of the weights (`WeightLayout.shapes`), or of some of them; fewer positions than
            were learnt are the first ones.
          shardings: those of `shapes`.
          layers: the layer of each row of the stacked weights (`LayerPlacement.layers`).
        """

        def read(path: Any, shape: jax.ShapeDtypeStruct, sharding: Any) -> jax.Array:
            keys = tuple(entry.key for entry in path)

            def shard(place: tuple[slice, ...] | None) -> np.ndarray:
                assert place is not None
                starts, stops = zip(*(s.indices(n)[:2] for s, n in zip(place, shape.shape, strict=True)), strict=True)
                result = np.zeros([b - a for a, b in zip(starts, stops, strict=True)], np.float32)
                if keys[0] != "layers":
                    self._fill(result, starts, keys, None)
                    return result
                for row in range(starts[0], stops[0]):
                    if layers[row] >= 0:
                        self._fill(result[row - starts[0]], starts[1:], keys, layers[row])
                return result

            return jax.make_array_from_callback(shape.shape, sharding, shard)

        weights: Weights = jax.tree_util.tree_map_with_path(read, shapes, shardings)
        return weights

    def _fill(self, result: np.ndarray, starts: tuple[int, ...], keys: tuple[str, ...], layer: int | None) -> None:
        for each in self._parts[keys, layer]:
            name = self._names[each.name]
            with np.errstate(over="ignore"):  # of numbers in float64; what they become is checked
                written = each.put(result, starts, self._tensors[name])
            if not np.isfinite(written).all():
                raise CheckpointError(
                    f"{self._folder}: {name} has NaN, infinity or a number too large for float32. No model computes "
                    "with such weights. Copy the folder again, or save the model from weights that are finite."
                )


def write_weights(
    folder: Path, config: Config, model: Model, weights: Weights, rows: tuple[int, ...], dtype: str
) -> None:
    """Writes a folder that transformers loads: the tensors, and `config.json`, whose other fields are kept.

    `rows` has the row of each layer in the stacked weights (`LayerPlacement.rows`).

    Raises:
      CheckpointError: when a weight is not finite in `dtype`; the message names the tensor.
    """
    base = read_json(folder) if (folder / "config.json").exists() else None
    fields = config_json(config, base)
    architecture = architecture_of(fields)
    fields["dtype"] = dtype

    def make(wanted: Wanted) -> np.ndarray:
        array: Any = weights
        for key in wanted.part.path:
            array = array[key]
        place: list[int | slice] = [slice(None)] * len(wanted.parameter.shape)
        if wanted.part.slice is not None:
            place[wanted.part.slice[0]] = wanted.part.slice[1]
        host = np.asarray(jax.device_get(array[(*([] if wanted.layer is None else [rows[wanted.layer]]), *place)]))
        host = host[tuple(slice(size) for size in wanted.own_shape)]  # without rows that pad the vocabulary
        with np.errstate(over="ignore"):
            tensor = wanted.to_tensor(host).astype(jnp.dtype(dtype))
        if not np.isfinite(tensor).all():
            raise CheckpointError(_not_written(wanted.name, host, dtype))
        return tensor

    tensors = [
        Tensor(each.name, each.shape, jnp.dtype(dtype), functools.partial(make, each))
        for each in wanted_tensors(architecture, model)
    ]
    write_folder(folder, tensors)
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def _not_written(name: str, host: np.ndarray, dtype: str) -> str:
    """Why a tensor that is not finite in a dtype is not written; `host` has its weights in float32."""
    if not np.isfinite(host).all():
        return f"{name} has NaN or infinity, with which no model computes. Take a checkpoint whose weights are finite."
    others = ["float32"] if dtype == "bfloat16" else ["bfloat16", "float32"]
    return (
        f"{name} has a weight of {host.flat[np.abs(host).argmax()]:g}, and {dtype} holds numbers up to "
        f"{float(jnp.finfo(dtype).max):g}. Use --dtype={' or '.join(others)}."
    )
