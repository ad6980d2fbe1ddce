"""The tokenizer of a folder of Hugging Face's transformers: its files, and the `tokenizer.json` made from them."""

import contextlib
import logging
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import tokenizers

from fiddlex.errors import CheckpointError, is_failure
from fiddlex.files.small_files import read_object
from fiddlex.files.whole_files import write_whole
from fiddlex.interop.tokenizer_classes import (
    built_class,
    class_options,
    differences,
    named_tokens,
    pipeline,
    text_of,
    with_ends,
    with_tokens,
)
from fiddlex.terminal.readable import shortened, shown

logger = logging.getLogger(__name__)

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)
_BAD_OPTIONS = "tokenizer_config.json, special_tokens_map.json or added_tokens.json does not fit its vocabulary"
_TEMPLATES = "additional_chat_templates"  # a folder of NAME.jinja


def read_tokenizer(folder: Path) -> tokenizers.Tokenizer | None:
    """The tokenizer of a folder: its `tokenizer.json`, or one made from older files as transformers makes it.

    Those of GPT-2 and Qwen2 are `vocab.json` and `merges.txt`, that of BERT is `vocab.txt`. `tokenizer_config.json`
    tells the class and its options (`fiddlex.interop.tokenizer_classes`). Without any of these files it is None.
    """
    there = {name for name in TOKENIZER_FILES if _is_there(folder / name)}
    if "tokenizer.json" in there:
        with _failures(folder, "tokenizer.json is no tokenizer"):
            return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    if {"vocab.json", "merges.txt"} <= there:
        return _byte_pairs(folder)
    return _word_pieces(folder) if "vocab.txt" in there else None


@contextlib.contextmanager
def _failures(folder: Path, problem: str) -> Iterator[None]:
    """Turns what a library raises into a CheckpointError: plain Exceptions, and panics."""
    try:
        yield
    except CheckpointError:
        raise
    except BaseException as error:
        if not is_failure(error):
            raise
        raise CheckpointError(f"{folder}: {problem} ({shortened(str(error))}). Copy the files again.") from error


def _is_there(path: Path) -> bool:
    """Whether a file is there; a directory of its name, or a broken link, is an error."""
    if os.path.lexists(path) and not path.is_file():
        kind = "is not a file" if path.exists() else "is a link to a file that does not exist"
        raise CheckpointError(f"{path} {kind}. Copy the tokenizer's files again, or remove it.")
    return path.is_file()


def _byte_pairs(folder: Path) -> tokenizers.Tokenizer:
    said, kind = class_options(folder), built_class(folder) or "GPT2Tokenizer"
    if kind not in ("GPT2Tokenizer", "Qwen2Tokenizer"):
        raise CheckpointError(
            f"{folder} has no tokenizer.json, and tokenizer_class={shown(kind)}: fiddlex makes one from vocab.json and "
            "merges.txt for GPT2Tokenizer and Qwen2Tokenizer alone. Save tokenizer.json with transformers' "
            "save_pretrained."
        )
    with _failures(folder, "vocab.json and merges.txt are no byte-pair encoding"):
        vocabulary, merges = tokenizers.models.BPE.read_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
        written = read_object(folder / "vocab.json")  # the library keeps an id modulo 2³², and the last of a key
        ids = Counter(written.values())
        if not ids or max(ids.values()) > 1 or written != vocabulary:
            problem = f"gives the id {ids.most_common(1)[0][0]} to several tokens" if ids else "has no token"
            if ids and max(ids.values()) == 1:
                problem = "has ids that are no numbers of tokens"
            raise CheckpointError(f"{folder}: vocab.json {problem}. Copy the file again.")
        model = tokenizers.models.BPE(vocabulary, merges)
    made = tokenizers.Tokenizer(model)
    with _failures(folder, _BAD_OPTIONS):
        made.normalizer, made.pre_tokenizer = pipeline(kind, said) or (None, None)
        made.decoder = tokenizers.decoders.ByteLevel()
        return with_ends(with_tokens(made, folder), folder)


def _word_pieces(folder: Path) -> tokenizers.Tokenizer:
    problem = "vocab.txt is no WordPiece vocabulary"
    with _failures(folder, problem):
        vocabulary = tokenizers.models.WordPiece.read_file(str(folder / "vocab.txt"))
    with _failures(folder, _BAD_OPTIONS):
        said, named = class_options(folder), named_tokens(folder)
        tokens = {kind: text_of(named.get(f"{kind}_token")) or f"[{kind.upper()}]" for kind in ("unk", "sep", "cls")}
    lacking = [name for name in tokens.values() if name not in vocabulary]
    if lacking:
        raise CheckpointError(
            f"{folder}: {problem} (it has no line {' and no line '.join(lacking)}). Copy the files again."
        )
    with _failures(folder, _BAD_OPTIONS):
        made = tokenizers.BertWordPieceTokenizer(
            vocabulary,
            lowercase=said.get("do_lower_case", True),
            strip_accents=said.get("strip_accents"),
            handle_chinese_chars=said.get("tokenize_chinese_chars", True),
            **{f"{kind}_token": text for kind, text in tokens.items()},
        )
        return with_tokens(tokenizers.Tokenizer.from_str(made.to_str()), folder)


def warn_of_other_ids(folder: Path, tokenizer: tokenizers.Tokenizer) -> None:
    """Warns where transformers 5 may make other ids of some texts than a folder's tokenizer, and says why."""
    try:
        found = differences(folder, tokenizer)
    except BaseException as error:
        if not is_failure(error):
            raise
        found = [f"what else its files say cannot be read ({shortened(str(error))})"]
    if found:
        logger.warning(
            "%s: transformers 5 may make other tokens of some texts than tokenizer.json, which fiddlex uses as it is: "
            "%s.",
            *(folder, "; ".join(found)),
        )


def copy_own_file(name: str, source: Path, target: Path) -> None:
    """Copies a file to the same path in another folder, if it is there.

    The folder may be somebody else's, and the copy may be published. So links are followed within the folder alone, and
    to `blobs/` of Hugging Face's cache, in whose `snapshots/REVISION/` every file is such a link. Any other link is an
    error.
    """
    if not (source / name).is_file():
        return
    folder = source.resolve()
    own = [folder, *([folder.parents[1] / "blobs"] if folder.parent.name == "snapshots" else [])]
    found = (source / name).resolve()
    if not any(each in found.parents for each in own):
        raise CheckpointError(
            f"{source / name} is a link to {found}, which is not in its folder, and would be copied to {target}. If "
            "you trust the folder, make a copy of it without links (cp -rL), and name that."
        )
    (target / name).parent.mkdir(exist_ok=True)
    shutil.copyfile(found, target / name)


def copy_tokenizer_files(source: Path, target: Path) -> None:
    """Copies the files of a folder's tokenizer, and its chat templates."""
    templates = sorted(f"{_TEMPLATES}/{path.name}" for path in (source / _TEMPLATES).glob("*.jinja"))
    for name in (*TOKENIZER_FILES, *templates):
        copy_own_file(name, source, target)


def copy_tokenizer(source: Path, target: Path) -> Path | None:
    """Copies a folder's tokenizer (`copy_tokenizer_files`), and warns of ids that will differ.

    Returns:
      The path of the copied `tokenizer.json`, or where the folder has none, of the one that `read_tokenizer` makes.
      None where the folder has no tokenizer.
    """
    tokenizer = read_tokenizer(source)
    copy_tokenizer_files(source, target)
    if tokenizer is None:
        return None
    warn_of_other_ids(source, tokenizer)
    path = target / "tokenizer.json"
    if not path.exists():
        write_whole(path, tokenizer.to_str(pretty=True))  # the library's own `save` raises no OSError
    return path
