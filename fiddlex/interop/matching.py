"""Finds each tensor that a model wants among those of a folder, and tells of all that do not fit."""

import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from fiddlex.errors import CheckpointError
from fiddlex.interop.architecture import Architecture
from fiddlex.interop.safetensors_files import DTYPES, TensorFolder
from fiddlex.terminal.readable import shortened

logger = logging.getLogger(__name__)

MOST_NAMED = 8  # tensors that a message names
WEIGHT_DTYPES = frozenset(DTYPES[name] for name in ("F64", "F32", "F16", "BF16"))


class WantedTensor(Protocol):
    """A tensor that a model wants."""

    @property
    def name(self) -> str:
        """The tensor's name."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape will do."""


def matched(
    folder: Path, tensors: TensorFolder, architecture: Architecture, wanted: Sequence[WantedTensor]
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
    extra = [name for name in places if name not in set(names.values()) and not _ends(name, architecture.ignored)]
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
    if problems := [f"{kind}: {_some(those)}" for kind, those in kinds.items() if those]:
        raise CheckpointError(
            f"The tensors of {folder} are not those of a {architecture.name} as its config.json describes it:\n  "
            + "\n  ".join(problems)
        )
    if unused:
        logger.warning("%s: a %s does not use %s, which are left out.", folder, architecture.name, _some(unused))
    return names


def _name_there(name: str, places: Collection[str], older_names: Mapping[str, str], copies: Mapping[str, str]) -> str:
    """The first of a tensor's names that is in the folder; the name of today when none is."""
    others = [name.removesuffix(now) + older for older, now in older_names.items() if name.endswith(now)]
    others += [copy for copy, of in copies.items() if of == name]
    return next((each for each in (name, *others) if each in places), name)


def _ends(name: str, ends: tuple[str, ...]) -> bool:
    return name.endswith(ends) if ends else False


def _some(names: list[str]) -> str:
    rest = len(names) - MOST_NAMED
    return ", ".join(map(shortened, names[:MOST_NAMED])) + (f" and {rest} more" if rest > 0 else "")
