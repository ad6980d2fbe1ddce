"""Which tokens begin or end a text, as the files beside a `tokenizer.json` say to transformers."""

from pathlib import Path
from typing import Any

from fiddlex.files.small_files import read_object


def special_names(tokenizer: Path) -> dict[str, str]:
    """The texts of `bos_token` and `eos_token` that a valid `tokenizer_config.json` beside a `tokenizer.json` has."""
    described = _read(tokenizer.with_name("tokenizer_config.json"))
    named = {name: described.get(name) for name in ("bos_token", "eos_token")}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str) and _is_valid(text)}


def end_ids(tokenizer: Path) -> set[int]:
    """The ids at which generation ends: `eos_token_id`, a number or a list, in a file beside a `tokenizer.json`.

    As in transformers, `generation_config.json` decides if it is there and names any, else `config.json`.
    """
    for name in ("generation_config.json", "config.json"):
        named = _read(tokenizer.with_name(name)).get("eos_token_id")
        if found := {each for each in (named if isinstance(named, list) else [named]) if type(each) is int}:
            return found
    return set()


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_object(path)
    except (OSError, ValueError):
        return {}


def _is_valid(text: str) -> bool:
    """Whether a text has no half of a surrogate pair, which is no character and no part of a token."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
