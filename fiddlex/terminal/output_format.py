"""The file that a program writes: its format, which the ending of its name may say, and whether it can be written."""

import os
import pathlib
from collections.abc import Mapping

from fiddlex.errors import ConfigError
from fiddlex.files.whole_files import check_replaceable


def output_format(asked: str | None, output: pathlib.Path | None, endings: Mapping[str, str], *, default: str) -> str:
    """The format to write: the one that is `asked` for, else the one that the output's ending says, else `default`.

    `endings` has the format of each ending of a file's name, as in `{".txt": "text"}`. Raises ConfigError when the two
    contradict each other, or no format was asked for and none has this ending.
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


def check_output(flag: str, path: pathlib.Path) -> None:
    """Raises ConfigError where a flag's file or device could not be written after the work; makes the file's folder."""
    reason = "it is a link to nothing" if path.is_symlink() and not path.exists() else None
    try:
        if path.is_dir() or not path.exists() or (not path.is_symlink() and path.is_file()):
            check_replaceable(path)
        elif not os.access(path, os.W_OK):
            reason = "Permission denied"
    except OSError as error:
        reason = error.strerror or str(error)
    if reason:
        raise ConfigError(f"{flag}={path} cannot be written: {reason}. Name a file in a folder that you may write to.")
