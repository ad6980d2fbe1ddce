"""The directory of a run: what lies in it, and whether a config may go on in it.

`config.json` (resolved), `metrics.jsonl`, `checkpoints/`, `tensorboard/`.
"""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fiddlex.config import Config
from fiddlex.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

# Changing one of these would give weights of other shapes.
SHAPE_FIELDS = (
    "model.family",
    "model.num_layers",
    "model.hidden_size",
    "model.num_heads",
    "model.mlp_size",
    "model.vocab_size",
    "model.seq_len",
)

# Changing one of these would train another model, or on another order of data; anything else may change on resume.
FIXED_FIELDS = (
    *SHAPE_FIELDS,
    "optimizer.name",
    "data.source",
    "data.tokenizer",
    "data.token_dtype",
    "data.eval_source",
    "data.eval_fraction",
    "data.global_batch_size",
    "data.seed",
    "train.seed",
)


def prepare(workdir: Path, config: Config) -> None:
    """Creates the directory, if it can be written, and checks that the config continues the run in it, if there is one.

    Raises:
      CheckpointError: when the directory cannot be written, or the run in it differs in one of `FIXED_FIELDS`.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        if (workdir / "checkpoints").is_dir() and any((workdir / "checkpoints").iterdir()):
            check_same_run(read_config(workdir), config, workdir)
        (workdir / "config.json.tmp").write_text(config.to_json(), encoding="utf-8")
    except OSError as error:
        raise CheckpointError(
            f"Cannot write to --workdir={workdir}: {error.strerror or error}. Choose a directory you may write to."
        ) from error


def write_config(workdir: Path) -> None:
    """Puts the config that `prepare` was given in place as `config.json`: the run goes on with it."""
    os.replace(workdir / "config.json.tmp", workdir / "config.json")


def read_config(workdir: Path) -> Config:
    """The config of the run in a workdir.

    Raises:
      CheckpointError: when there is none or it cannot be read.
    """
    path = workdir / "config.json"
    try:
        return Config.from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} does not exist: --workdir={workdir} is not the directory of a training run. "
            "Train one with experiments/train.py --config=… --workdir=…"
        ) from error
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def check_same_run(saved: Config, config: Config, workdir: Path) -> None:
    """Raises CheckpointError, with every difference, when `config` cannot continue the run of `saved`."""
    _check_same(FIXED_FIELDS, saved, config, workdir)
    if config != saved:
        logger.info("The config differs from the one the checkpoints were made with; config.json now has the new one.")


def check_same_shapes(saved: Config, config: Config, workdir: Path) -> None:
    """Raises CheckpointError, with every difference, when weights of `saved` do not fit the model of `config`."""
    _check_same(SHAPE_FIELDS, saved, config, workdir)


def _check_same(names: Sequence[str], saved: Config, config: Config, workdir: Path) -> None:
    different = [
        f"{name} is {_get(config, name)!r}, was {_get(saved, name)!r}"
        for name in names
        if _get(config, name) != _get(saved, name)
    ]
    if different:
        raise CheckpointError(
            f"--workdir={workdir} holds checkpoints of another run:\n  "
            + "\n  ".join(different)
            + "\nSet these fields back to go on with it, or choose a new --workdir to start another."
        )


def _get(config: Config, name: str) -> Any:
    section, field = name.split(".")
    return getattr(getattr(config, section), field)
