"""The format in which a program writes a file: the one asked for, or the one that the ending of its name says."""

import pathlib
from collections.abc import Mapping

from fiddlex.errors import ConfigError


def output_format(asked: str | None, output: pathlib.Path | None, endings: Mapping[str, str], *, default: str) -> str:
    """Returns the format to write.

    Args:
      asked: the value of `--format`; None: it was not given.
      output: the value of `--output`, which may have no ending; None: the program prints.
      endings: the format that each ending of a file's name says, as in `{".txt": "text"}`.
      default: the format when neither says one.

    Raises:
      ConfigError: when the two contradict each other, or no format was asked for and none has this ending.
    """
    ending = output.suffix.lower() if output else ""
    said = endings.get(ending)
    if asked and said and asked != said:
        raise ConfigError(
            f"--format={asked} contradicts --output={output}, whose ending says {said}. Leave --format out, or name "
            "another file."
        )
    if ending and not asked and not said:
        raise ConfigError(
            f"--output={output}: no format has the ending {ending}. Use one of {', '.join(endings)}, or add --format."
        )
    return asked or said or default
