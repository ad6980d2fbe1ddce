"""Which tokens begin or end a text, as the files beside a `tokenizer.json` say to transformers."""

from pathlib import Path
from typing import Any

from fiddlex.errors import DataError
from fiddlex.files.small_files import read_object
from fiddlex.terminal.readable import shown

_NAMING_IDS = ("generation_config.json", "config.json")  # in the order in which they decide


def special_names(tokenizer: Path) -> dict[str, str]:
    """The texts of `bos_token` and `eos_token` that a valid `tokenizer_config.json` beside a `tokenizer.json` has."""
    described = _read(tokenizer.with_name("tokenizer_config.json"))
    named = {name: described.get(name) for name in ("bos_token", "eos_token")}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str) and _is_valid(text)}


def end_ids(tokenizer: Path) -> set[int]:
    """The ids at which generation ends: `eos_token_id`, a number or a list, in a file beside a `tokenizer.json`.

    As in transformers, `generation_config.json` decides if it is there and names any, else `config.json`.

    Raises:
      DataError: when the value is neither.
    """
    for name in _NAMING_IDS:
        if found := _ids(tokenizer.with_name(name), "eos_token_id"):
            return found
    return set()


def check_token_ids(folder: Path) -> None:
    """Raises DataError where a folder's files name no ids of tokens as those that begin or end a text.

    Ids above the vocabulary are taken: those of some models are, and mean nothing to them.
    """
    for name in _NAMING_IDS:
        for option in ("bos_token_id", "eos_token_id"):
            _ids(folder / name, option)


def _ids(path: Path, option: str) -> set[int]:
    """The ids that an option of a file names; none where it, or a readable file, is missing, or it is null."""
    value = _read(path).get(option)
    named = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(each) is int and each >= 0 for each in named):  # bool is no number here
        raise DataError(
            f"{path}: {option}={shown(value)} must be the number of a token (0 or more), a list of such numbers, or "
            "null. Correct it in that file."
        )
    return set(named)


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_object(path)
    except (OSError, ValueError):
        return {}


def _is_valid(text: str) -> bool:
    """Whether a text has no half of a surrogate pair, which is no character and no part of a token."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
