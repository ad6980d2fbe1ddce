"""What a checkpoint says of itself: the JSON file `meta/metadata`, with the names of the arrays that it holds.

It has the step, the layer of each row of the stacked weights, a fingerprint of the training data, each array's checksum
and shape, the padded size of the vocabulary, jax's settings (`fiddlex.cluster.jax_settings.KEPT`), and where the run
has them the loss scale, the usual loss and gradient norm, the state of the choice of semantics and the dtype of older
weights; and its own checksum. Invariant: `read_meta` returns what `make_meta` made, or raises.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fiddlex.cluster.jax_settings import kept_settings
from fiddlex.files.small_files import read_small
from fiddlex.terminal.readable import shown
from fiddlex.train.run.checkpoints.checksums import text_checksum
from fiddlex.train.run.checkpoints.file_digests import foreign_files
from fiddlex.train.step.state import SavedState

META = "meta"  # name of the item
_MOST_TEXT = 1000  # characters of a name
Meta = dict[str, Any]


def items_of(state: SavedState) -> dict[str, Any]:
    """The parts of a state, also empty ones, by the names of the folders in which orbax saves them."""
    return {
        "weights": state.weights,
        "optimizer": state.optimizer,
        "last_update": state.last_update,
        **state.older,
    }


def named(items: dict[str, Any]) -> dict[str, Any]:
    """The arrays of items by their full names, such as `weights.layers.mlp.up.kernel`."""
    leaves = jax.tree_util.tree_leaves_with_path(items)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def arrays_of(state: SavedState) -> dict[str, Any]:
    return named(items_of(state))


class About(NamedTuple):
    """What a checkpoint says of its state that the state does not tell."""

    step: int
    layers: Sequence[int]  # the layer of each row of the state's stacked weights (`LayerPlacement.layers`)
    fingerprint: str  # of the training data (`Corpus.fingerprint`)
    padded_vocab: int  # vocabulary rows in the state's arrays, with padding rows; 0 when there is no vocabulary


def make_meta(state: SavedState, about: About, checksums: Mapping[str, int]) -> Meta:
    """What the checkpoint of a state says of itself; `checksums` are those of the state's arrays by full name."""
    meta: Meta = {
        "step": about.step,
        "layers": list(about.layers),
        "fingerprint": about.fingerprint,
        "checksums": dict(checksums),
        "shapes": {name: list(x.shape) for name, x in arrays_of(state).items()},
        "padded_vocab": about.padded_vocab,
        "settings": kept_settings(),
    }
    if state.scaling:
        meta["scaling"] = [np.asarray(part).tolist() for part in jax.device_get(state.scaling)]
    if state.usual:
        meta["usual"] = [np.asarray(part).item() for part in jax.device_get(state.usual)]
    if state.switch:
        meta["switch"] = state.switch
    if state.older:
        meta["older_dtype"] = jax.tree.leaves(state.older)[0].dtype.name
    return meta | {"checksum": text_checksum(meta)}


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value.isascii() and value.isprintable() and len(value) <= _MOST_TEXT


def _are_numbers(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_number, value))


def _by_name(is_valid: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, dict) and all(map(_is_text, value)) and all(map(is_valid, value.values()))


_REQUIRED = ("step", "layers", "fingerprint", "checksums")
_FIELDS: dict[str, Callable[[object], bool]] = {
    "step": _is_number,
    "layers": _are_numbers,
    "fingerprint": _is_text,
    "checksums": _by_name(_is_number),
    "shapes": _by_name(_are_numbers),
    "padded_vocab": _is_number,
    "older_dtype": _is_text,
    "settings": _by_name(_is_text),
}


def read_meta(path: Path) -> Meta:
    """What a checkpoint, whose folder has its step's name, says of itself; whatever reads checkpoints calls this first.

    Raises:
      OSError: when the file cannot be read.
      ValueError: when it is not what was saved, the checkpoint is that of another step, or it has a link, a pipe or a
        device.
    """
    for name, reason in foreign_files(path).items():
        raise ValueError(f"{name}: {reason}")
    meta = json.loads(read_small(path / META / "metadata"))
    if not isinstance(meta, dict) or meta.pop("checksum", None) != text_checksum(meta):
        raise ValueError(f"what it says of itself is not what was saved: {shown(meta)}")
    for name, is_valid in _FIELDS.items():
        if (name in _REQUIRED or name in meta) and not is_valid(meta.get(name)):
            raise ValueError(f"its {name} is not one that fiddlex writes: {shown(meta.get(name))}")
    if path.name.isdecimal() and meta["step"] != int(path.name):
        raise ValueError(f"it is the checkpoint of step {meta['step']} under another name")
    return meta
