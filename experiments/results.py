"""Results of studies: JSON Lines files to which a line is added as each part ends."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

from absl import logging

from fiddlex.errors import ConfigError


def read_results(path: pathlib.Path, fields: Sequence[str]) -> list[dict[str, Any]]:
    """The objects in a file; none where there is no file.

    A last line that was cut short when the program was killed is taken off the file, so that the next one added stands
    by itself.

    Args:
      path: of the file.
      fields: that each object must have.

    Raises:
      ConfigError: at any other line that is no such object.
    """
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    lines, results = text.splitlines(), []
    for number, line in enumerate(lines, start=1):
        try:
            result = json.loads(line)
            if not isinstance(result, dict) or not result.keys() >= set(fields):
                raise ValueError(f"it must be an object with {', '.join(fields)}")
        except (ValueError, RecursionError) as error:
            if number == len(lines) and not text.endswith("\n"):
                logging.warning("%s: line %d was cut short and is taken off.", path, number)
                break
            raise ConfigError(f"{path}, line {number}: not a result ({error}). Remove the line.") from error
        results.append(result)
    if text and not text.endswith("\n"):
        path.write_text("".join(f"{line}\n" for line in lines[: len(results)]), encoding="utf-8")
    return results
