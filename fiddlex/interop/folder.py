"""A folder of Hugging Face's transformers: its `config.json` and the files of its tokenizer."""

import json
import os
import shutil
from pathlib import Path

import tokenizers

from fiddlex.config import ModelConfig
from fiddlex.errors import CheckpointError, ConfigError
from fiddlex.interop.architectures import Json, model_of

PREFIX = "hf:"  # of a folder's name where a workdir could stand too
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "generation_config.json",
)


def folder_of(source: str) -> Path | None:
    """The folder that `hf:DIR` names; None for any other name."""
    return Path(os.path.expanduser(source[len(PREFIX) :])) if source.startswith(PREFIX) else None


def read_json(folder: Path) -> Json:
    """The `config.json` of a folder.

    Raises:
      CheckpointError: when there is none, or it is no JSON object.
    """
    path = folder / "config.json"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError("it is not a JSON object")
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} does not exist: hf:{folder} is not a folder that transformers' save_pretrained wrote."
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Copy it again.") from error
    return value


def read_model(folder: Path) -> ModelConfig:
    """The model section of a config that computes the model of a folder.

    Raises:
      CheckpointError: when `config.json` cannot be read, or fiddlex does not compute what it describes.
    """
    try:
        return model_of(read_json(folder))
    except ConfigError as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from error


def copy_tokenizer(source: Path, target: Path) -> Path | None:
    """Copies the files of a folder's tokenizer to another folder.

    Returns:
      The path of the copied `tokenizer.json`; where the folder has only GPT-2's `vocab.json` and `merges.txt`, of one
      made from these. None where the folder has no tokenizer.

    Raises:
      CheckpointError: when `vocab.json` and `merges.txt` are not those of a tokenizer.
    """
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    path, vocab, merges = (target / name for name in ("tokenizer.json", "vocab.json", "merges.txt"))
    if path.exists():
        return path
    if not (vocab.exists() and merges.exists()):
        return None
    try:
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(str(vocab), str(merges)))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{source}: vocab.json and merges.txt are no byte-pair encoding ({error}).") from error
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    if "<|endoftext|>" in tokenizer.get_vocab():
        tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(path))
    return path
