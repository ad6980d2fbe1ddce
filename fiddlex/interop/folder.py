"""A folder of Hugging Face's transformers: its `config.json` and the files of its tokenizer."""

import os
import shutil
from pathlib import Path
from typing import Any

import tokenizers

from fiddlex.config import Config
from fiddlex.config.small_files import read_object
from fiddlex.config.whole_files import write_whole
from fiddlex.errors import CheckpointError, ConfigError, is_failure
from fiddlex.interop.architectures import ARCHITECTURES, settings_of, sliding_window
from fiddlex.interop.messages import shortened
from fiddlex.interop.options import Json
from fiddlex.interop.safetensors_files import TensorFolder

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

    Raises:
      CheckpointError: when `config.json` or the headers of the files of tensors cannot be read.
    """
    value = read_json(folder)
    named = value.get("architectures")
    found = ARCHITECTURES.get(named[0]) if isinstance(named, list) and named and isinstance(named[0], str) else None
    if found is not None and found.wider is not None and found.wider[0] in TensorFolder(folder).places:
        return value | {"architectures": [found.wider[1]]}
    return value


def read_settings(folder: Path) -> dict[str, Any]:
    """The fields of a config that the model of a folder determines (`settings_of`).

    Raises:
      CheckpointError: when `config.json` cannot be read, or fiddlex does not compute what it describes.
    """
    try:
        return settings_of(described(folder))
    except ConfigError as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from error


def check_window(folder: Path, config: Config) -> None:
    """Checks that sequences are no longer than the sliding window of a folder's model.

    Raises:
      CheckpointError: when `model.seq_len` is above it, or `config.json` cannot be read.
    """
    try:
        window = sliding_window(read_json(folder))
    except ConfigError as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from error
    if window is not None and config.model.seq_len > window:
        raise CheckpointError(
            f"model.seq_len={config.model.seq_len} is above the {window} positions that attention spans in {folder}: "
            f"fiddlex has no sliding window, and would compute another model. Set model.seq_len={window} or less."
        )


def read_tokenizer(folder: Path) -> tokenizers.Tokenizer | None:
    """The tokenizer of a folder: its `tokenizer.json`, or one made from GPT-2's or BERT's older files.

    GPT-2's are `vocab.json` and `merges.txt`. BERT's is `vocab.txt`; `tokenizer_config.json` tells whether text is put
    into lower case (`do_lower_case`, true if it is missing).

    Returns:
      The tokenizer; None where the folder has none of these files.

    Raises:
      CheckpointError: when the files are not those of a tokenizer, or one is a directory or a broken link.
    """
    there = {name for name in TOKENIZER_FILES if _is_there(folder / name)}
    path, vocab, merges, words = (folder / name for name in ("tokenizer.json", "vocab.json", "merges.txt", "vocab.txt"))
    try:
        if path.name in there:
            return tokenizers.Tokenizer.from_file(str(path))
        if {vocab.name, merges.name} <= there:
            return _byte_pairs(vocab, merges)
        return _word_pieces(words, folder / "tokenizer_config.json") if words.name in there else None
    except BaseException as error:
        if not is_failure(error):
            raise
        names = "vocab.txt is no WordPiece vocabulary"
        if path.name in there:
            names = "tokenizer.json is no tokenizer"
        elif {vocab.name, merges.name} <= there:
            names = "vocab.json and merges.txt are no byte-pair encoding"
        raise CheckpointError(f"{folder}: {names} ({shortened(str(error))}). Copy the files again.") from error


def _is_there(path: Path) -> bool:
    """Whether a file is there.

    Raises:
      CheckpointError: when something else has its name: a directory, or a link to a file that does not exist.
    """
    if os.path.lexists(path) and not path.is_file():
        kind = "is not a file" if path.exists() else "is a link to a file that does not exist"
        raise CheckpointError(f"{path} {kind}. Copy the tokenizer's files again, or remove it.")
    return path.is_file()


def _byte_pairs(vocab: Path, merges: Path) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(str(vocab), str(merges)))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    if "<|endoftext|>" in tokenizer.get_vocab():
        tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def _word_pieces(words: Path, options: Path) -> tokenizers.Tokenizer:
    said = read_object(options) if options.is_file() else {}
    vocabulary = tokenizers.models.WordPiece.read_file(str(words))
    lacking = [name for name in ("[UNK]", "[SEP]", "[CLS]") if name not in vocabulary]
    if lacking:
        raise ValueError(f"it has no line {' and no line '.join(lacking)}")
    made = tokenizers.BertWordPieceTokenizer(
        vocabulary,
        lowercase=said.get("do_lower_case", True),
        strip_accents=said.get("strip_accents"),
        handle_chinese_chars=said.get("tokenize_chinese_chars", True),
    )
    return tokenizers.Tokenizer.from_str(made.to_str())


def copy_own_file(source: Path, target: Path) -> None:
    """Copies a file of a folder of transformers, if it is there.

    The folder may be somebody else's, and the copy may be published. So links are followed within the folder alone, and
    to `blobs/` of Hugging Face's cache, in whose `snapshots/REVISION/` every file is such a link.

    Raises:
      CheckpointError: when the file is a link to anywhere else.
    """
    if not source.is_file():
        return
    folder = source.parent.resolve()
    own = [folder, *([folder.parents[1] / "blobs"] if folder.parent.name == "snapshots" else [])]
    found = source.resolve()
    if not any(each in found.parents for each in own):
        raise CheckpointError(
            f"{source} is a link to {found}, which is not in its folder, and would be copied to {target.parent}. If "
            "you trust the folder, make a copy of it without links (cp -rL), and name that."
        )
    shutil.copyfile(found, target)


def copy_tokenizer(source: Path, target: Path) -> Path | None:
    """Copies the files of a folder's tokenizer to another folder.

    Returns:
      The path of the copied `tokenizer.json`, or where the folder has none, of the one that `read_tokenizer` makes.
      None where the folder has no tokenizer.

    Raises:
      CheckpointError: when the files are not those of a tokenizer, or links to files elsewhere.
    """
    tokenizer = read_tokenizer(source)
    for name in TOKENIZER_FILES:
        copy_own_file(source / name, target / name)
    if tokenizer is None:
        return None
    path = target / "tokenizer.json"
    if not path.exists():
        write_whole(path, tokenizer.to_str(pretty=True))  # the library's own `save` raises no OSError
    return path
