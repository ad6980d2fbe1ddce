"""Weights from a folder in which orbax has saved a pytree of Flax: a variable dict, a `TrainState`, a state of NNX.

Its arrays have the names of a run's weights, with `layers` as stacked arrays or as one entry for each layer, or those
of a module of `fiddlex.flax.models` (docs/flax.md). Nothing there tells what the weights mean, such as the tokenizer.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.tree_util import keystr

from fiddlex.config import Config
from fiddlex.errors import CheckpointError
from fiddlex.flax.models import CLASSES
from fiddlex.flax.weights import Keys, Location, module_locations, shapes_of, weights_of
from fiddlex.interop.matching import some
from fiddlex.models.registry import network_of
from fiddlex.models.weights import Weights
from fiddlex.train.run.checkpoints.meta import META
from fiddlex.train.run.checkpoints.reading import first_line, make_reader

logger = logging.getLogger(__name__)

_METADATA = "_METADATA"  # file in a folder in which orbax has saved a pytree
PARAMS = "params"  # what a `TrainState` and the variables of Linen call the parameters
FORMS = (
    "It takes arrays by the names of a run's weights, {embedding, layers, head} with the layers stacked or one by one, "
    "or by those of fiddlex.flax.GPT, Llama or Bert (docs/flax.md)."
)


def is_tree(folder: Path) -> bool:
    """Whether orbax has saved a pytree in this very folder."""
    return (folder / _METADATA).is_file()


def trees_in(folder: Path) -> list[Path]:
    """Folders below this one in which orbax has saved a pytree, as `ocp.CheckpointManager` makes them."""
    return sorted(path.parent for depth in ("*", "*/*") for path in folder.glob(f"{depth}/{_METADATA}"))


def read_tree(folder: Path, config: Config) -> Weights:
    """The weights of a config's model, on the host, float32 with layers stacked in order, from a folder of orbax.

    Raises:
      CheckpointError: when the folder cannot be read or is a part of a run's checkpoint, or its arrays are not those of
        the model; the message names them.
    """
    if (folder.parent / META).is_dir():
        raise CheckpointError(
            f"train.init_from={folder} is a part of a run's checkpoint, whose layers may be in another order. Name the "
            f"run's directory, {folder.parents[2]}."
        )
    try:
        described = ocp.PyTreeCheckpointHandler().metadata(folder).tree
        others = sorted(set(described) - {PARAMS}) if PARAMS in described else []
        described = {PARAMS: described[PARAMS]} if others else described
    except Exception as error:  # orbax and json raise many kinds for a damaged file
        raise _unreadable(folder, error) from error
    found = _by_path(described, folder)
    places = _places(config, found)
    check_arrays(found, places, f"train.init_from={folder}", remedy=FORMS)
    try:
        arguments = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), described)
        arguments = ocp.args.PyTreeRestore(item=described, restore_args=arguments, partial_restore=True)
        arrays = make_reader(ocp.PyTreeCheckpointHandler).restore(folder, args=arguments)
    except Exception as error:
        raise _unreadable(folder, error) from error
    logger.info("The run starts from the arrays of %s%s.", folder, f", without {', '.join(others)}" * bool(others))
    return weights_of(_by_path(arrays, folder), places)


def _by_path(tree: Any, folder: Path) -> dict[Keys, Any]:
    """The leaves of a tree by their names, without the levels that Flax puts among them, and what is no parameter."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    named = {tuple(keystr((key,), simple=True) for key in path): leaf for path, leaf in leaves}
    # The streams of random numbers of a module's dropout.
    named = {path: leaf for path, leaf in named.items() if "rngs" not in path}
    if all(path[-1:] == ("value",) for path in named):  # a state of NNX that is no pure dictionary
        named = {path[:-1]: leaf for path, leaf in named.items()}
    found = {tuple(name for name in path if name != PARAMS): leaf for path, leaf in named.items()}
    if len(found) < len(named):
        raise CheckpointError(
            f"train.init_from={folder}: several arrays have one name once levels called {PARAMS!r} are left out, as "
            "Flax has them. Save the parameters alone."
        )
    return found


def _places(config: Config, found: Mapping[Keys, Any]) -> list[Location]:
    """Where the arrays of a config's model are in a tree that has arrays of these names."""
    shapes = shapes_of(network_of(config))
    if not {path[:1] for path in found} & {("embedding",), ("head",)} and config.model.family in CLASSES:
        return module_locations(shapes)
    one_by_one = any(path[:1] == ("layers",) and path[1:2] and path[1].isdecimal() for path in found)

    def of(name: Keys, shape: tuple[int, ...]) -> list[Location]:
        if not one_by_one or name[0] != "layers":
            return [Location(name, name, None, None, shape)]
        return [Location(("layers", str(row), *name[1:]), name, row, None, shape[1:]) for row in range(shape[0])]

    return [place for name, shape in shapes.items() for place in of(name, shape)]


def check_arrays(arrays: Mapping[Keys, Any], places: Sequence[Location], what: str, *, remedy: str = "") -> None:
    """Raises CheckpointError when arrays, by their paths, are not those of `places`; the message names all of them."""
    wanted = {each.path: each for each in places}
    pairs = [(path, wanted[path], arrays[path]) for path in wanted if path in arrays]
    kinds = {
        "missing": [f"{_text(each.path)} {each.shape}" for each in places if each.path not in arrays],
        "not of this model": [f"{_text(path)} {_shape(each)}" for path, each in arrays.items() if path not in wanted],
        "of another shape": [
            f"{_text(path)} is {_shape(each)}, must be {place.shape}"
            for path, place, each in pairs
            if not place.takes(_shape(each))
        ],
        "not of floating-point numbers": [
            f"{_text(path)} is {dtype}"
            for path, _, each in pairs
            if not jnp.issubdtype(dtype := getattr(each, "dtype", jnp.dtype(object)), jnp.floating)
        ],
    }
    if problems := [f"{kind}: {some(those)}" for kind, those in kinds.items() if those]:
        listed = "\n  ".join(problems) + f"\n{remedy}" * bool(remedy)
        raise CheckpointError(f"The arrays of {what} are not those of the model:\n  {listed}")


def _shape(leaf: Any) -> tuple[int, ...]:
    """The shape of an array, or of what orbax says of it; () of a text or another object."""
    return tuple(getattr(leaf, "shape", ()))


def _text(path: Keys) -> str:
    return ".".join(path)


def _unreadable(folder: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"train.init_from={folder} cannot be read: {first_line(error)}. Copy it again.")
