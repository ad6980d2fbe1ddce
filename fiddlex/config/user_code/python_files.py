"""Runs Python files that the user names, such as config files, and says where one of them fails.

Such a file can import modules of its folder, where Python finds no others of their names. Invariant: whatever it raises
becomes a message for its author, which names the file and the line; only what a signal raises passes.
"""

import contextlib
import difflib
import os
import pathlib
import runpy
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from typing import Any

from fiddlex.errors import ConfigError, FiddlexError, Stopped

# Folders of fiddlex, of Python and of installed packages.
_LIBRARIES = str(pathlib.Path(__file__).parents[2]), *map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))


def run_file(path: str) -> dict[str, Any]:
    """Runs a Python file; returns what its module then holds, by name. No other module of fiddlex runs files."""
    with _finding_its_folder(path):
        return runpy.run_path(path)


@contextlib.contextmanager
def _finding_its_folder(path: str) -> Iterator[None]:
    """Lets code of a file import modules of its folder, after all that Python finds without it."""
    folder = os.path.dirname(os.path.abspath(path))
    if folder in sys.path:
        yield
        return
    sys.path.append(folder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the file may have removed it
            sys.path.remove(folder)


@contextlib.contextmanager
def errors_of(path: str, error_type: type[FiddlexError] = ConfigError) -> Iterator[None]:
    """Turns what code of a file, which runs in the body, raises into an `error_type` that names the file and its line.

    A FiddlexError that the file itself raises is passed on unchanged, and so is one of another type. `path` is the file
    as the code's traceback names it.
    """
    try:
        with _finding_its_folder(path):
            yield
    except FiddlexError as error:
        frames = traceback.extract_tb(error.__traceback__)
        if not isinstance(error, error_type) or frames[-1].filename == path:
            raise
        raise error_type(f"{place(path, error)}: {error}") from error  # raised by what the file calls
    except SyntaxError as error:
        where = f"{error.filename}, line {error.lineno}" if error.filename else place(path, error)
        raise error_type(f"{where}: {error.msg}.") from error
    except (KeyboardInterrupt, Stopped):
        raise
    except SystemExit as error:
        raise error_type(
            f"{place(path, error)}: SystemExit({error.code!r}) would end the program. A file that a program runs must "
            "not exit: raise an error that says what is wrong."
        ) from error
    except BaseException as error:
        raise error_type(f"{place(path, error)}: {type(error).__name__}: {error}") from error


def place(path: str, error: BaseException) -> str:
    """A file, with its last line that was running when `error` was raised.

    If none was, as where a class inherits what fails, the file and the line of other code of the user.
    """
    frames = traceback.extract_tb(error.__traceback__)
    for is_wanted in (path.__eq__, is_of_user):
        if found := [frame for frame in frames if is_wanted(frame.filename)]:
            return f"{found[-1].filename}, line {found[-1].lineno}"
    return path


def is_of_user(path: str) -> bool:
    """Whether a file is neither of fiddlex nor of an installed package or Python itself."""
    return os.path.exists(path) and not any(path.startswith(f"{folder}{os.sep}") for folder in _LIBRARIES)


def similar_file(path: str) -> str:
    """' Did you mean x.py?' with the Python file of the same folder whose name is nearest; empty where none is near."""
    folder, name = os.path.split(path)
    entries = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
    close = difflib.get_close_matches(name, [entry for entry in entries if entry.endswith(".py")], n=1)
    return f" Did you mean {os.path.join(folder, close[0])}?" if close else ""
