"""Prompts from a file of JSON Lines, for `fiddlex generate`."""

import pathlib

from fiddlex.data.bad_lines import BadLineError
from fiddlex.data.tables import decode_line, json_value, numbered_lines
from fiddlex.errors import ConfigError


def read_prompts(path: pathlib.Path) -> list[str]:
    """Prompts of a file whose lines each hold a string, or an object with the key "prompt"; blank lines are left out.

    Raises:
      ConfigError: when the file cannot be read, a line has no prompt of valid Unicode, or no line has one.
    """
    try:
        with path.open("rb") as file:
            lines = list(numbered_lines(file, blank=b" \t\r\n"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
    prompts = []
    for number, line in lines:
        try:
            value = json_value(decode_line(line))
        except BadLineError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error
        prompt = value.get("prompt") if isinstance(value, dict) else value
        if not isinstance(prompt, str) or not is_unicode(prompt):
            raise ConfigError(f'{path}, line {number}: give a string, or an object with "prompt", of valid Unicode.')
        prompts.append(prompt)
    if not prompts:
        raise ConfigError(f"{path} has no prompts: give one on each line.")
    return prompts


def is_unicode(text: str) -> bool:
    """Whether `text` has no lone halves of surrogate pairs."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
