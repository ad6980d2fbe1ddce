"""Weights from a folder in which orbax has saved a pytree of Flax."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from fiddlex.errors import CheckpointError
from fiddlex.flax.weights import Path, Place
from fiddlex.interop.matching import some


def check_arrays(arrays: Mapping[Path, Any], places: Sequence[Place], what: str) -> None:
    """Raises CheckpointError when arrays, by their paths, are not those of `places`; the message names all of them."""
    wanted = {each.path: each.shape for each in places}
    shapes = {path: np.shape(array) for path, array in arrays.items()}
    there = [path for path in wanted if path in shapes]
    kinds = {
        "missing": [f"{_text(path)} {wanted[path]}" for path in wanted if path not in shapes],
        "not of this model": [f"{_text(path)} {shape}" for path, shape in shapes.items() if path not in wanted],
        "of another shape": [
            f"{_text(path)} is {shapes[path]}, must be {wanted[path]}" for path in there if shapes[path] != wanted[path]
        ],
        "not of floating-point numbers": [
            f"{_text(path)} is {arrays[path].dtype}"
            for path in there
            if not jnp.issubdtype(arrays[path].dtype, jnp.floating)
        ],
    }
    if problems := [f"{kind}: {some(those)}" for kind, those in kinds.items() if those]:
        raise CheckpointError(f"The arrays of {what} are not those of the model:\n  " + "\n  ".join(problems))


def _text(path: Path) -> str:
    return ".".join(path)
