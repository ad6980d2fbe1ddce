"""Finds each tensor that a model wants among those of a folder, and tells of all that do not fit."""

import dataclasses
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np

from fiddlex.errors import CheckpointError
from fiddlex.interop.architecture import Architecture, Part
from fiddlex.interop.safetensors_files import DTYPES, TensorFolder
from fiddlex.models.spec import Parameter
from fiddlex.terminal.readable import shortened

logger = logging.getLogger(__name__)

MOST_NAMED = 8  # tensors that a message names
WEIGHT_DTYPES = frozenset(DTYPES[name] for name in ("F64", "F32", "F16", "BF16"))


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A tensor of a folder as a model wants it."""

    part: Part
    layer: int | None  # the number of its layer; None outside the layers
    parameter: Parameter  # the description of the whole weight

    @property
    def name(self) -> str:
        return self.part.name if self.layer is None else self.part.name.format(self.layer)

    @property
    def own_shape(self) -> tuple[int, ...]:
        """The sizes of the part of the weight that the tensor is."""
        sizes = self.parameter.shape
        return sizes if self.part.slice is None else _without(sizes, self.part.slice[0])

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor: a matrix for the kernel of a product, a vector for a bias."""
        parameter, shape = self.parameter, self.own_shape
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
        own = (tensor.T if self.part.transposed else tensor).reshape(self.own_shape)
        return own[..., ::-1] if self.part.classes_reversed else own

    def to_tensor(self, own: np.ndarray) -> np.ndarray:
        shape = self.shape[::-1] if self.part.transposed else self.shape
        tensor = (own[..., ::-1] if self.part.classes_reversed else own).reshape(shape)
        return tensor.T if self.part.transposed else tensor

    def put(self, result: np.ndarray, starts: tuple[int, ...], tensor: np.ndarray) -> np.ndarray:
        """Copies the tensor into its part of `result`, a shard of the layer's weight that begins at `starts`.

        Returns:
          The part of `result` that now has numbers of the tensor, as a view; it is empty if the shard has none.
        """
        if self.part.slice is not None:
            dim, index = self.part.slice
            if not 0 <= index - starts[dim] < result.shape[dim]:
                return result[:0]
            result, starts = result[(slice(None),) * dim + (index - starts[dim],)], _without(starts, dim)
        own = self.to_own(tensor)
        piece = own[tuple(slice(a, a + n) for a, n in zip(starts, result.shape, strict=True))]
        written = result[tuple(slice(n) for n in piece.shape)]  # smaller than the shard where rows pad the vocabulary
        written[...] = piece
        return written


def _without(sizes: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return sizes[:dim] + sizes[dim + 1 :]


def matched(
    folder: Path, tensors: TensorFolder, architecture: Architecture, wanted: Sequence[Wanted]
) -> dict[str, str]:
    """The name in the folder of each wanted tensor; an error names all tensors that do not fit.

    Names may lack the class's prefix, or be those of older versions of transformers. A tensor that repeats another may
    stand in its place, or beside it with the same numbers.
    """
    places = tensors.places
    bare = bool(architecture.prefix) and not any(name.startswith(architecture.prefix) for name in places)

    def own(name: str) -> str:
        return name.removeprefix(architecture.prefix) if bare else name

    copies = {copy: own(of) for copy, of in architecture.copies.items() if copy not in {each.name for each in wanted}}
    names = {each.name: _name_there(own(each.name), places, architecture.older_names, copies) for each in wanted}
    missing = [names[each.name] for each in wanted if names[each.name] not in places]
    found = [(each, names[each.name], places[names[each.name]]) for each in wanted if names[each.name] in places]
    other = [
        f"{name} is {place.shape}, must be {each.shape}" for each, name, place in found if not each.takes(place.shape)
    ]
    not_floats = [f"{name} is {place.dtype}" for _, name, place in found if place.dtype not in WEIGHT_DTYPES]
    extra = [name for name in places if name not in set(names.values()) and not name.endswith(architecture.ignored)]
    pairs = [(copy, copies[copy]) for copy in extra if copy in copies and copies[copy] in places]
    different = [f"{copy} and {of}" for copy, of in pairs if not np.array_equal(tensors[copy], tensors[of])]
    unused = [name for name in extra if name.startswith(tuple(own(start) for start in architecture.unused) or "\0")]
    extra = [name for name in extra if name not in {*unused, *(copy for copy, _ in pairs)}]
    kinds = {
        "missing": missing,
        "not of this model": extra,
        "of another shape": other,
        "of a dtype that is not floating-point, as in quantized models": not_floats,
        "not equal, as they must be": different,
    }
    if problems := [f"{kind}: {some(those)}" for kind, those in kinds.items() if those]:
        raise CheckpointError(
            f"The tensors of {folder} are not those of a {architecture.name} as its config.json describes it:\n  "
            + "\n  ".join(problems)
        )
    if unused:
        logger.warning("%s: a %s does not use %s, which are left out.", folder, architecture.name, some(unused))
    return names


def _name_there(name: str, places: Collection[str], older_names: Mapping[str, str], copies: Mapping[str, str]) -> str:
    """The first of a tensor's names that is in the folder; the name of today when none is."""
    others = [name.removesuffix(now) + older for older, now in older_names.items() if name.endswith(now)]
    others += [copy for copy, of in copies.items() if of == name]
    return next((each for each in (name, *others) if each in places), name)


def some(names: list[str]) -> str:
    """The first names of a list, and how many more there are."""
    rest = len(names) - MOST_NAMED
    return ", ".join(map(shortened, names[:MOST_NAMED])) + (f" and {rest} more" if rest > 0 else "")
