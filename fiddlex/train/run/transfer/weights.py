"""Transfers weights from one run to another: gathers them on the host, then shards them in the new run's layout.

The run that `train.init_from` names provides all weights that the new model has too: the embedding, the layers, and the
head, except for a classifier of another task. All other weights start from the new model's own initial values.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from fiddlex.config import Config
from fiddlex.config.families import family
from fiddlex.config.fields import MEANING, paths
from fiddlex.config.overrides import FLUSHED, replaced
from fiddlex.errors import CheckpointError
from fiddlex.models.model import Model
from fiddlex.models.weights import Weights
from fiddlex.parallel.sharding import on_devices, on_host
from fiddlex.schedules.placement import PADDING
from fiddlex.train.run.best import restore_result
from fiddlex.train.run.workdir import check_original_window, described_differences, read_config
from fiddlex.train.step.program import Program
from fiddlex.train.step.state import WeightLayout

logger = logging.getLogger(__name__)

CLASSIFIERS = ("classifier", "score")  # of the label's head, which only a run of the same task takes over


def whole(weights: Weights, model: Model, layout: WeightLayout) -> Weights:
    """Master weights on the host: float32, without padding, layers stacked in model order."""
    host, rows = jax.tree.map(on_host, weights), np.asarray(layout.placement.rows)

    def unpadded(axes: tuple[str | None, ...], w: np.ndarray) -> np.ndarray:
        if axes[:1] == ("layers",):
            return w[rows]
        return w[: model.config.vocab_size] if axes[:1] == ("vocab",) else w

    return jax.tree.map(unpadded, model.axes(), host, is_leaf=lambda x: isinstance(x, tuple))


def placed(host: Weights, model: Model, layout: WeightLayout, mesh: Mesh) -> Weights:
    """The inverse of `whole`: pads host weights and shards them in the layout."""
    layers = np.asarray(layout.placement.layers)

    def padded(axes: tuple[str | None, ...], w: np.ndarray, like: jax.ShapeDtypeStruct) -> np.ndarray:
        if axes[:1] == ("layers",):
            return np.where((layers != PADDING).reshape(-1, *[1] * (w.ndim - 1)), w[np.maximum(layers, 0)], 0)
        return w if w.shape == like.shape else np.pad(w, [(0, like.shape[0] - len(w)), *[(0, 0)] * (w.ndim - 1)])

    arrays = jax.tree.map(padded, model.axes(), host, layout.shapes, is_leaf=lambda x: isinstance(x, tuple))
    placed: Weights = on_devices(arrays, layout.master_shardings(mesh))
    return placed


def pretrained(workdir: Path, config: Config, mesh: Mesh, fresh: Callable[[], Weights]) -> Weights:
    """The initial weights of a new run, in the form of `whole`: another run's where it has them, else the fresh ones.

    `workdir` is `train.init_from`; its best weights are used, or else its newest. In its place may stand a folder in
    which orbax has saved all weights (`trees.py`). `fresh` returns the new run's own initial weights in the form of
    `whole`; it is called once the other run's weights fit.
    """
    from fiddlex.train.run.transfer import trees  # which imports Flax: other runs start without it

    workdir = Path(os.path.expanduser(workdir))  # Path.expanduser fails for an unknown user
    if trees.is_tree(workdir):
        return trees.read_tree(workdir, config)
    if not (workdir / "config.json").exists() and not workdir.is_file():
        what = "is no folder in which orbax has saved weights (docs/flax.md). Name one of the two, or hf:DIR"
        if inner := trees.trees_in(workdir):
            what = f"has folders in which orbax has saved arrays. Name one of these, such as {inner[-1]}"
        raise CheckpointError(f"train.init_from={workdir} is no directory of a run, and {what}.")
    saved = read_config(workdir, named_by="train.init_from")
    check_fits(saved, config, workdir)
    check_original_window(workdir, config)
    source = replaced(config, {"model": saved.model, "data.labels": saved.data.labels, **FLUSHED})
    program = Program(source, mesh)
    state = restore_result(workdir, saved, program)
    if state is None:
        raise CheckpointError(f"train.init_from={workdir} has no checkpoint. Train that run with one, or name another.")
    given = whole(state.weights, program.model, program.layout)
    if not same_task(saved, config):
        for name in CLASSIFIERS:
            given["head"].get("label", {}).pop(name, None)
    initial, new = taken(given, fresh())
    logger.info("The run starts from these weights%s.", f"; new: {', '.join(new)}" * bool(new))
    return initial


def check_fits(saved: Config, config: Config, workdir: Path) -> None:
    """Raises CheckpointError, listing every difference, when weights of `saved` do not fit the model of `config`."""
    different = described_differences(paths(Config, MEANING), saved, config)
    if not _same_tokenizer(saved.data.tokenizer, config.data.tokenizer):
        different.append(f"data.tokenizer is {config.data.tokenizer!r}, was {saved.data.tokenizer!r}")
    if config.model.seq_len > saved.model.seq_len and "rope_base" not in family(saved.model.family).fields:
        different.append(
            f"model.seq_len is {config.model.seq_len}, above the {saved.model.seq_len} positions that were learnt"
        )
    if different:
        raise CheckpointError(
            f"The weights of train.init_from={workdir} do not fit this model:\n  "
            + "\n  ".join(different)
            + "\nSet these fields as they are there."
        )


def same_task(saved: Config, config: Config) -> bool:
    """Whether two configs have the same objective and the same classes, so that a classifier means the same in both."""
    return (saved.model.task, saved.data.classes) == (config.model.task, config.data.classes)


def _same_tokenizer(left: str, right: str) -> bool:
    """Whether two values of `data.tokenizer` are equal, or name two files with the same content."""
    paths = [Path(os.path.expanduser(name)) for name in (left, right)]
    return left == right or (all(map(Path.is_file, paths)) and paths[0].read_bytes() == paths[1].read_bytes())


def taken(given: Weights, fresh: Weights, path: str = "") -> tuple[Any, list[str]]:
    """`fresh` with leaves replaced by those of `given`, and the names of the parts that `given` lacks."""
    if not isinstance(fresh, dict):
        # Of a longer sequence's positions the first are kept.
        return given if given.shape == fresh.shape else given[: fresh.shape[0]], []
    result, new = {}, list[str]()
    for name, part in fresh.items():
        if name in given:
            result[name], missing = taken(given[name], part, f"{path}{name}.")
            new += missing
        else:
            result[name] = part
            new.append(f"{path}{name}")
    return result, new
