"""Weights from and to a folder of Hugging Face's transformers, one tensor at a time, in any layout.

Reading fills each device's shard from the mapped files; writing takes each tensor from the devices when its turn comes.
So the host never holds the whole model beside the arrays of the mesh.
"""

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fiddlex.config import Config
from fiddlex.errors import CheckpointError
from fiddlex.interop.architectures import Architecture, Part, architecture_of, config_json
from fiddlex.interop.folder import read_json
from fiddlex.interop.safetensors_files import Tensor, TensorFolder, write_folder
from fiddlex.models.model import Model
from fiddlex.models.spec import Parameter
from fiddlex.models.weights import Weights

MOST_NAMED = 8  # tensors that an error names


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A tensor of a folder as a model wants it.

    Attributes:
      part: the part of a weight that it is.
      layer: the number of its layer; None outside the layers.
      parameter: the weight's description.
    """

    part: Part
    layer: int | None
    parameter: Parameter

    @property
    def name(self) -> str:
        """The tensor's name."""
        return self.part.name if self.layer is None else self.part.name.format(self.layer)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor: a matrix for the kernel of a product, a vector for a bias."""
        parameter, shape = self.parameter, self.parameter.shape
        if parameter.matrix is None:
            return shape if len(shape) == 2 and parameter.decays else (math.prod(shape),)
        inputs = math.prod(shape[: len(parameter.matrix.inputs)])
        matrix = (inputs, math.prod(shape) // inputs)
        return matrix[::-1] if self.part.transposed else matrix

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape is the part; of learned positions, a model may use the first ones."""
        if self.part.path[-1] == "positions":
            return shape[1:] == self.shape[1:] and shape[0] >= self.shape[0]
        return shape == self.shape

    def to_own(self, tensor: np.ndarray) -> np.ndarray:
        """The part of the weight from the tensor, as a view where numpy has one."""
        if self.part.path[-1] == "positions":
            return tensor[: self.shape[0]]
        return (tensor.T if self.part.transposed else tensor).reshape(self.parameter.shape)

    def to_tensor(self, own: np.ndarray) -> np.ndarray:
        """The tensor from the part of the weight."""
        shape = self.shape[::-1] if self.part.transposed else self.shape
        return own.reshape(shape).T if self.part.transposed else own.reshape(shape)


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


def read_weights(folder: Path, model: Model, shapes: Weights, shardings: Weights, layers: tuple[int, ...]) -> Weights:
    """The master weights of a model from a folder, float32, sharded and padded as asked for.

    Args:
      folder: the folder.
      model: the model.
      shapes: ShapeDtypeStructs of the weights (`WeightLayout.shapes`).
      shardings: their shardings.
      layers: the layer of each row of the stacked weights (`LayerPlacement.layers`).

    Raises:
      CheckpointError: when tensors are missing, left over or of another shape; the message names them.
    """
    architecture = architecture_of(read_json(folder))
    tensors, wanted = TensorFolder(folder), wanted_tensors(architecture, model)
    names = _names_there(tensors, architecture, wanted)
    _check(folder, tensors, architecture, wanted, names)
    by_place = {(each.part.path, each.layer): each for each in wanted}

    def read(path: Any, shape: jax.ShapeDtypeStruct, sharding: Any) -> jax.Array:
        keys = tuple(entry.key for entry in path)

        def tensor(layer: int | None) -> np.ndarray:
            each = by_place[keys, layer]
            return each.to_own(tensors[names[each.name]])

        def shard(place: tuple[slice, ...] | None) -> np.ndarray:
            assert place is not None
            starts, stops = zip(*(s.indices(n)[:2] for s, n in zip(place, shape.shape, strict=True)), strict=True)
            result = np.zeros([b - a for a, b in zip(starts, stops, strict=True)], np.float32)
            if keys[0] != "layers":
                _fill(result, starts, tensor(None))
                return result
            for row in range(starts[0], stops[0]):
                if layers[row] >= 0:
                    _fill(result[row - starts[0]], starts[1:], tensor(layers[row]))
            return result

        return jax.make_array_from_callback(shape.shape, sharding, shard)

    weights: Weights = jax.tree_util.tree_map_with_path(read, shapes, shardings)
    return weights


def _fill(result: np.ndarray, starts: tuple[int, ...], weight: np.ndarray) -> None:
    """Copies into `result`, a shard that begins at `starts`, what the weight has of it."""
    piece = weight[tuple(slice(a, a + n) for a, n in zip(starts, result.shape, strict=True))]
    result[tuple(slice(n) for n in piece.shape)] = piece  # smaller than the shard where rows pad the vocabulary


def _names_there(tensors: TensorFolder, architecture: Architecture, wanted: list[Wanted]) -> dict[str, str]:
    """The name of each wanted tensor in the folder, where the class's prefix may be left out."""
    prefix = architecture.prefix
    bare = bool(prefix) and not any(name.startswith(prefix) for name in tensors.places)
    return {each.name: each.name.removeprefix(prefix) if bare else each.name for each in wanted}


def _check(
    folder: Path, tensors: TensorFolder, architecture: Architecture, wanted: list[Wanted], names: dict[str, str]
) -> None:
    """Raises CheckpointError, naming the tensors, when the folder's tensors are not those that the model wants."""
    places = tensors.places
    missing = [names[each.name] for each in wanted if names[each.name] not in places]
    other = [
        f"{names[each.name]} is {places[names[each.name]].shape}, must be {each.shape}"
        for each in wanted
        if names[each.name] in places and not each.takes(places[names[each.name]].shape)
    ]
    extra = [
        name for name in places if name not in set(names.values()) and not name.endswith(architecture.ignored or "\0")
    ]
    if tied := [name for name in extra if name == "lm_head.weight"]:  # older versions wrote the tied table twice
        table = names[next(each.name for each in wanted if each.part.path == ("embedding", "tokens"))]
        if table in places and np.array_equal(tensors[tied[0]], tensors[table]):
            extra.remove(tied[0])
    problems = [f"missing: {_some(missing)}"] * bool(missing)
    problems += [f"not of this model: {_some(extra)}"] * bool(extra)
    problems += [f"of another shape: {_some(other)}"] * bool(other)
    if problems:
        raise CheckpointError(
            f"The tensors of {folder} are not those of a {architecture.name} as its config.json describes it:\n  "
            + "\n  ".join(problems)
        )


def _some(names: list[str]) -> str:
    rest = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def write_weights(
    folder: Path, config: Config, model: Model, weights: Weights, rows: tuple[int, ...], dtype: str
) -> None:
    """Writes a folder that transformers loads: `config.json` and the tensors.

    Args:
      folder: the folder, which may have a `config.json` to keep fields of.
      config: the config of the run.
      model: its model.
      weights: the master weights on the mesh.
      rows: the row of each layer in the stacked weights (`LayerPlacement.rows`).
      dtype: dtype of the tensors, as in `bfloat16`.
    """
    base = read_json(folder) if (folder / "config.json").exists() else None
    described = config_json(config, base)
    architecture = architecture_of(described)
    described["dtype"] = dtype

    def make(wanted: Wanted) -> np.ndarray:
        array: Any = weights
        for key in wanted.part.path:
            array = array[key]
        if wanted.layer is not None:
            array = array[rows[wanted.layer]]
        host = np.asarray(jax.device_get(array))
        host = host[tuple(slice(size) for size in wanted.parameter.shape)]  # without rows that pad the vocabulary
        return wanted.to_tensor(host).astype(jnp.dtype(dtype))

    tensors = [
        Tensor(each.name, each.shape, jnp.dtype(dtype), functools.partial(make, each))
        for each in wanted_tensors(architecture, model)
    ]
    write_folder(folder, tensors)
    (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
