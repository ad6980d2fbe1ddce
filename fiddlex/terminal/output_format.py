"""The file that a program writes: its format, which the ending of its name may say, and whether it can be written."""

import os
import pathlib
from collections.abc import Mapping

from fiddlex.errors import ConfigError
from fiddlex.files.whole_files import check_replaceable


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


def check_output(flag: str, path: pathlib.Path) -> None:
    """Raises ConfigError where a flag's file could not be written once the work is done; makes the folder it is in.

    Args:
      flag: the flag that names the file, as in `--output`.
      path: the file; a device such as /dev/stdout will do.
    """
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
