"""Results of studies: JSON Lines files to which each finished part of a study adds a line."""

import contextlib
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fiddlex.errors import ConfigError
from fiddlex.files.file_locks import try_lock


@contextlib.contextmanager
def owned(path: pathlib.Path) -> Iterator[None]:
    """Keeps other processes that call this from a file while the body runs; an empty file is made where there is none.

    Raises:
      ConfigError: when the file cannot be written, or another process has it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}. Name another file for the results.") from error
    with file:
        if not try_lock(file.fileno()):
            raise ConfigError(f"{path}: another run adds its results there. Wait until it ends, or name another file.")
        yield


def read_results(path: pathlib.Path, fields: Sequence[str]) -> list[dict[str, Any]]:
    """The objects in a file; none when the file does not exist.

    A last line that is incomplete, because the program was killed or is still writing it, is skipped.

    Args:
      path: the file, which is not changed.
      fields: names of the fields that each object must have.

    Raises:
      ConfigError: when any other line is not such an object.
    """
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 ({error}): not results of a study. Name another file.") from error
    lines = text.splitlines()
    results: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            result = json.loads(line)
        except (ValueError, RecursionError) as error:
            if results and number == len(lines) and not text.endswith("\n"):
                break
            raise ConfigError(f"{path}, line {number}: not a result ({error}). Remove the line.") from error
        if not isinstance(result, dict) or not result.keys() >= set(fields):
            raise ConfigError(f"{path}, line {number}: not a result, an object with {', '.join(fields)}. Remove it.")
        results.append(result)
    return results


def append_result(path: pathlib.Path, result: Mapping[str, Any]) -> None:
    """Adds a line to a file that `read_results` has read, and replaces an incomplete last line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        file.seek(0)
        whole, newline, rest = file.read().rpartition(b"\n")
        if _is_json(rest):
            file.write(b"\n")
        else:
            file.truncate(len(whole) + len(newline))
        file.write(json.dumps(result).encode() + b"\n")


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
