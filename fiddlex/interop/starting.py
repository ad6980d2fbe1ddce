"""The config of a run that starts from a folder of Hugging Face's transformers."""

import os
from pathlib import Path

from fiddlex.config import Config
from fiddlex.config.config import LABELLED
from fiddlex.config.overrides import replaced
from fiddlex.errors import CheckpointError, ConfigError
from fiddlex.interop.folder import PREFIX, read_settings
from fiddlex.interop.folder_tokenizer import read_tokenizer

UNNAMED_TEXTS = "tsv:texts.tsv"  # the data of a classifier until data.source names some


def folder_config(folder: Path) -> Config:
    """The default config with the model and the classes of a folder; classes come with a source of labelled texts."""
    config = replaced(Config(), read_settings(folder))
    if config.model.task in LABELLED:
        config.data.source = UNNAMED_TEXTS
    return config


def starting_config(folder: str) -> Config:
    """The default config with the model, the classes and the tokenizer of a folder, and `train.init_from`.

    A folder without a tokenizer leaves `data.tokenizer=bytes`; one in an older form than `tokenizer.json` is an error.
    """
    path = Path(os.path.expanduser(folder))
    try:
        config = folder_config(path)
        tokenizer = path / "tokenizer.json"
        if tokenizer.is_file():
            config.data.tokenizer = os.path.abspath(tokenizer)
        elif read_tokenizer(path) is not None:
            raise ConfigError(
                f"{path} has a tokenizer in an older form, and data.tokenizer takes a tokenizer.json. Convert the "
                f"folder (fiddlex convert --source={PREFIX}{folder} --target=WORKDIR), and copy the file "
                f"WORKDIR/huggingface/tokenizer.json that this makes to {path}."
            )
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    config.train.init_from = f"{PREFIX}{os.path.abspath(path)}"
    return config
