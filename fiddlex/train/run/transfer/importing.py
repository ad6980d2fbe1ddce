"""Weights from a folder of Hugging Face's transformers, in the layout of a program."""

import logging
import os
from pathlib import Path
from typing import Any

import tokenizers

from fiddlex.config import Config
from fiddlex.config.overrides import replaced
from fiddlex.errors import CheckpointError, DataError, is_failure
from fiddlex.interop.folder import check_window, read_settings
from fiddlex.interop.folder_tokenizer import read_tokenizer
from fiddlex.interop.huggingface import FolderWeights
from fiddlex.models.registry import make_model
from fiddlex.models.weights import Weights
from fiddlex.train.run.transfer.weights import CLASSIFIERS, check_fits, same_task, taken
from fiddlex.train.run.workdir import described_differences
from fiddlex.train.step.program import Program

logger = logging.getLogger(__name__)

Keys = tuple[str, ...]  # that lead to a weight


def imported(folder: Path, program: Program, fresh: Weights) -> Weights:
    """The initial weights of a run that starts from a folder of transformers, in the layout of the program.

    As in `pretrained`, the folder provides all weights that the model has too, except for a classifier of another task.
    `fresh` are the run's own initial weights on the mesh. Those that the folder replaces are deleted before the
    folder's are read, so that the devices never hold both.
    """
    config = program.config
    saved = replaced(config, read_settings(folder))
    check_fits(saved, config, folder)
    check_window(folder, config)
    _check_tokenizer(folder, config)
    model, layout = make_model(saved), program.layout
    stored = FolderWeights(folder, model)
    there = _leaves(model.network.parts)
    if not same_task(saved, config):
        there = {keys for keys in there if keys[:2] != ("head", "label") or keys[2] not in CLASSIFIERS}
    kept = there & _leaves(fresh)
    for keys in kept:
        _at(fresh, keys).delete()
    shapes, shardings = (_only(tree, kept, there) for tree in (layout.shapes, layout.master_shardings(program.mesh)))
    weights, new = taken(stored.read(shapes, shardings, layout.placement.layers), fresh)
    logger.info("The run starts from the weights of %s%s.", folder, f"; new: {', '.join(new)}" * bool(new))
    initial: Weights = weights
    return initial


def converted(folder: Path, program: Program) -> Weights:
    """All weights of a folder of transformers, in the layout of a program for the same model."""
    config = program.config
    saved = replaced(config, read_settings(folder))
    different = described_differences(["model.objective"], saved, config)
    if len(saved.data.classes) != len(config.data.classes):
        different += described_differences(["data.labels"], saved, config)
    pair = {"mlm_nsp", "mlm_sop"}  # which have the same weights
    if different and {saved.model.task, config.model.task} != pair:
        raise CheckpointError(
            f"The weights of {folder} are those of another model:\n  "
            + "\n  ".join(different)
            + f"\nConvert it as it is, or start a run of the other kind with train.init_from=hf:{folder}."
        )
    check_fits(saved, config, folder)
    check_window(folder, config)
    layout = program.layout
    shardings = layout.master_shardings(program.mesh)
    return FolderWeights(folder, program.model).read(layout.shapes, shardings, layout.placement.layers)


def _leaves(tree: Weights, path: Keys = ()) -> set[Keys]:
    """The keys of every leaf of a nested dictionary."""
    if not isinstance(tree, dict):
        return {path}
    return set().union(*(_leaves(part, (*path, key)) for key, part in tree.items()))


def _at(tree: Weights, path: Keys) -> Any:
    found: Any = tree
    for key in path:
        found = found[key]
    return found


def _only(tree: Weights, kept: set[Keys], there: set[Keys], path: Keys = ()) -> Any:
    """A nested dictionary with the leaves at `kept`, and with the dictionaries that lead to any of `there`."""
    if not isinstance(tree, dict):
        return tree
    starts = {each[: len(path) + 1] for each in there}
    below = {key: (*path, key) for key in tree if (*path, key) in starts}
    return {
        key: _only(tree[key], kept, there, own)
        for key, own in below.items()
        if isinstance(tree[key], dict) or own in kept
    }


def warn_of_bytes(folder: Path, config: Config) -> None:
    """Warns where a folder has no tokenizer, and the run therefore takes bytes for the tokens of its weights."""
    if config.data.tokenizer == "bytes":
        logger.warning(
            "%s has no tokenizer (tokenizer.json, vocab.json and merges.txt, or vocab.txt), so that this run reads "
            "text as bytes, data.tokenizer=bytes. If the weights know other tokens, set data.tokenizer.",
            folder,
        )


def _check_tokenizer(folder: Path, config: Config) -> None:
    """Raises CheckpointError when a folder's tokenizer gives tokens other numbers than `data.tokenizer` does."""
    theirs, data = read_tokenizer(folder), config.data
    unnamed = data.tokenizer == "bytes" and data.source.startswith("tokens:")  # ids whose tokenizer nobody names
    if theirs is None and not unnamed:
        warn_of_bytes(folder, config)
    if theirs is None or unnamed:
        return
    here = f"data.tokenizer={data.tokenizer!r}"
    remedy = f"Set data.tokenizer to {folder / 'tokenizer.json'}."
    if not (folder / "tokenizer.json").is_file():
        remedy = f"Convert it (--source=hf:{folder}), which makes a tokenizer.json, and start from that workdir."
    ids = theirs.get_vocab(with_added_tokens=True)
    if data.tokenizer == "bytes":
        raise CheckpointError(f"{here}, but the model of {folder} has learnt {len(ids)} tokens of its own. {remedy}")
    try:
        ours = tokenizers.Tokenizer.from_file(os.path.expanduser(data.tokenizer)).get_vocab(with_added_tokens=True)
    except BaseException as error:
        if not is_failure(error):
            raise
        raise DataError(f"{here} is not a JSON file of the tokenizers library ({error}).") from error
    if differing := sorted(name for name in ids.keys() | ours.keys() if ids.get(name) != ours.get(name)):
        name = differing[0]
        raise CheckpointError(
            f"{here} numbers {len(differing)} of its tokens otherwise than the tokenizer of {folder} does: {name!r} is "
            f"{ours.get(name, 'missing')} here and {ids.get(name, 'missing')} there. {remedy}"
        )
