"""A folder of Hugging Face's transformers and its `config.json`."""

import os
from pathlib import Path
from typing import Any

from fiddlex.config import Config
from fiddlex.errors import CheckpointError, ConfigError
from fiddlex.files.small_files import read_object
from fiddlex.interop.architectures import ARCHITECTURES, settings_of, sliding_window
from fiddlex.interop.options import Json
from fiddlex.interop.safetensors_files import TensorFolder

PREFIX = "hf:"  # of a folder's name where a workdir could stand too


def folder_of(source: str) -> Path | None:
    """The folder that `hf:DIR` names; None for any other name."""
    return Path(os.path.expanduser(source[len(PREFIX) :])) if source.startswith(PREFIX) else None


def read_json(folder: Path) -> Json:
    path = folder / "config.json"
    try:
        return read_object(path)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} does not exist: hf:{folder} is not a folder that transformers' save_pretrained wrote."
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Copy it again.") from error


def described(folder: Path) -> Json:
    """The `config.json` of a folder, naming the class that its tensors are of.

    The published BERTs are described as BertForMaskedLM and have the head for pairs of sentences too.
    """
    value = read_json(folder)
    named = value.get("architectures")
    found = ARCHITECTURES.get(named[0]) if isinstance(named, list) and named and isinstance(named[0], str) else None
    if found is not None and found.wider is not None and found.wider[0] in TensorFolder(folder).places:
        return value | {"architectures": [found.wider[1]]}
    return value


def read_settings(folder: Path) -> dict[str, Any]:
    """The fields of a config that the model of a folder determines (`settings_of`)."""
    try:
        return settings_of(described(folder))
    except ConfigError as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from error


def check_window(folder: Path, config: Config) -> None:
    """Checks that sequences are no longer than the sliding window of a folder's model."""
    try:
        window = sliding_window(read_json(folder))
    except ConfigError as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from error
    if window is not None and config.model.seq_len > window:
        raise CheckpointError(
            f"model.seq_len={config.model.seq_len} is above the {window} positions that attention spans in {folder}: "
            f"fiddlex has no sliding window, and would compute another model. Set model.seq_len={window} or less."
        )
