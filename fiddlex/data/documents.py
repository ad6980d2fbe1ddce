"""Text read as documents: the sources `stdlib` and `text:PATH`.

Invariant: documents are in the order of their names (POSIX paths relative to the source), so that the same files give
the same corpus on every machine; no document is empty.
"""

import dataclasses
import logging
import os
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

from fiddlex.errors import DataError
from fiddlex.terminal.readable import counted

logger = logging.getLogger(__name__)

BYTE_ORDER_MARK = "\ufeff"  # which some editors write before a text
_BINARY_PROBE_BYTES = 8192
_LISTED_FILES = 3  # skipped files that the log names

# Names of folders and files that `stdlib` leaves out: other people's packages, tests, generated data.
_SKIPPED_NAMES = frozenset(
    {
        *("site-packages", "dist-packages", "_bundled"),
        *("test", "tests", "idle_test"),
        *("pydoc_data", "__phello__"),
    }
)
_SKIPPED_PREFIXES = ("test_", "_sysconfigdata", "_sysconfig_vars", "config-")
# Text that the generator of charmap codecs writes into each of them.
_CHARMAP_MARKS = ("decoding_table = ", "decoding_map = ")


@dataclasses.dataclass(frozen=True)
class Document:
    """A text and its name, which is the POSIX path relative to the source."""

    name: str
    text: str


def read_stdlib() -> list[Document]:
    """The Python sources of the running interpreter's standard library, without tests and generated tables.

    They are about 9 MB of text that every machine has. They differ between Python versions; to compare runs, use the
    same version.
    """
    root = Path(sysconfig.get_path("stdlib"))
    documents = []
    for name, path in files_below(root, skip=_is_not_stdlib):
        # Distributions put links to their own configuration into the library (Debian's sitecustomize.py).
        if not name.endswith(".py") or path.is_symlink():
            continue
        text = path.read_bytes().decode("utf-8", errors="replace")
        if text and not _is_charmap(name, text):
            documents.append(Document(name, text))
    if not documents:
        raise DataError(
            f"stdlib: there are no .py files in {str(root)!r}, where this interpreter keeps its standard library "
            "(zipped or stripped?). Use another Python build, or the source text:PATH."
        )
    return documents


def read_text(path: Path) -> list[Document]:
    """The text file `path`, or every text file below the folder `path`.

    In a folder, hidden files and folders, files with a NUL byte in their first 8 KiB, files that are not UTF-8, further
    links to a file, links to folders and empty files are left out; the log reports all but the hidden and the empty
    ones. A byte order mark is no text; newlines are not changed.

    Raises:
      DataError: when there is no such file or folder, no text in it, or a single file that is not UTF-8.
    """
    if path.is_file():
        documents = [Document(path.name, _decode_file(path))]
    elif path.is_dir():
        texts = [(name, _text_or_none(file)) for name, file in files_below(path, skip=is_hidden)]
        documents = [Document(name, text) for name, text in texts if text]
        _warn_of_passed_over(path, [name for name, text in texts if text is None])
    else:
        what = "it is neither a file nor a folder" if path.exists() else "there is no such file or folder"
        raise DataError(f"text:{path}: {what}. Check the path; the source `stdlib` needs none.")
    if not any(document.text for document in documents):
        what = "the file is empty" if path.is_file() else "the folder has no UTF-8 text file that is not hidden"
        raise DataError(f"text:{path}: {what}. Give a text file, or a folder with text files at any depth.")
    return documents


def file_states(path: Path | None) -> list[tuple[str, int, int]]:
    """Name, bytes and time of change (ns) of the file `path`, or of all files below it that are not hidden.

    None stands for the standard library that `read_stdlib` reads. A change of any file that is read shows in the
    result; files that are not read may be in it too.
    """
    if path is not None and not path.is_dir():
        files = [(path.name, path)] if path.exists() else []
    elif path is None:
        files = files_below(Path(sysconfig.get_path("stdlib")), skip=_is_not_stdlib)
    else:
        files = files_below(path, skip=is_hidden)
    states = ((name, file.stat()) for name, file in files)
    return [(name, state.st_size, state.st_mtime_ns) for name, state in states]


def files_below(root: Path, *, skip: Callable[[str], bool]) -> list[tuple[str, Path]]:
    """Name and path of the regular files below `root`, in the order of their names; `skip` judges each path part.

    Of a file and the links to it, symbolic or hard, only one is taken, a symbolic link only where the file is not
    there: else a text could be both trained on and held out. The log names the others, and links that are not followed.
    """
    paths = sorted((path.relative_to(root).as_posix(), path) for path in _walk(root, skip))
    found = [(name, path) for name, path in paths if path.is_file()]
    if left := [name for name, path in paths if path.is_symlink() and not path.is_file()]:
        logger.warning("%s: links to folders, and to what is not there, are not followed: %s", root, _some(left))
    taken: dict[tuple[int, int], str] = {}
    for name, path in sorted(found, key=lambda each: (each[1].is_symlink(), each[0])):
        state = path.stat()
        if (first := taken.setdefault((state.st_dev, state.st_ino), name)) != name:
            logger.warning("%s: %s is the file %s again, and is read once.", root, name, first)
    kept = set(taken.values())
    return [(name, path) for name, path in found if name in kept]


def _walk(root: Path, skip: Callable[[str], bool]) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root, onerror=_raise):
        subfolders[:] = [name for name in subfolders if not skip(name)]
        links = [name for name in subfolders if Path(folder, name).is_symlink()]  # which os.walk does not enter
        yield from (Path(folder, name) for name in (*names, *links) if not skip(name))


def _raise(error: OSError) -> None:
    raise error  # by default os.walk skips a folder that it cannot read


def is_hidden(name: str) -> bool:
    return name.startswith(".")


def _is_not_stdlib(name: str) -> bool:
    return is_hidden(name) or name in _SKIPPED_NAMES or name.startswith(_SKIPPED_PREFIXES)


def _is_charmap(name: str, text: str) -> bool:
    return name.startswith("encodings/") and any(mark in text for mark in _CHARMAP_MARKS)


def _warn_of_passed_over(folder: Path, names: list[str]) -> None:
    if names:
        number = counted(len(names), "file")
        logger.warning("text:%s: %s passed over (not UTF-8 or binary): %s", folder, number, _some(names))


def _some(names: list[str]) -> str:
    return ", ".join(names[:_LISTED_FILES]) + ", …" * (len(names) > _LISTED_FILES)


def _decode_file(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8").removeprefix(BYTE_ORDER_MARK)
    except UnicodeDecodeError as error:
        raise DataError(
            f"text:{path} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {error.start} "
            f"({error.reason}). Convert the file (iconv -t UTF-8), or read token files with tokens:PATH."
        ) from error


def _text_or_none(path: Path) -> str | None:
    """The file's text, or None when it is binary or not UTF-8."""
    with path.open("rb") as file:
        head = file.read(_BINARY_PROBE_BYTES)
        if b"\0" in head:
            return None
        data = head + file.read()
    try:
        return data.decode("utf-8").removeprefix(BYTE_ORDER_MARK)
    except UnicodeDecodeError:
        return None
