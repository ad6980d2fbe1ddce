"""Texts in the rows of files: read in the order of the rows, a batch at a time, each when it is tokenized.

The sources `hf:PATH` and `array_record:PATH` consist of such files. Invariant: a row is a document, and its name is the
name of its file and its number in the file, so that adding files or appending rows changes no other document's name.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fiddlex.data.documents import Document, files_below, is_hidden
from fiddlex.errors import DataError

# Names of splits as authors write them into the names of files and folders, and what they are called here.
_SPLITS = {
    **{name: "train" for name in ("train", "training")},
    **{name: "validation" for name in ("validation", "valid", "val", "dev")},
    **{name: "test" for name in ("test", "testing")},
}
_SPLIT_NAME = re.compile(f"(?<![a-z])({'|'.join(_SPLITS)})(?![a-z])")


@dataclasses.dataclass(frozen=True, eq=False)
class TextRows:
    """The texts of one file, or of one split of a saved dataset."""

    name: str  # the POSIX path relative to the source, with which the documents' names begin
    num_rows: int
    # Takes bool[num_rows]; yields number and text ("" for none) of each True row, in order; raises DataError, OSError.
    read: Callable[[np.ndarray], Iterator[tuple[int, str]]]

    def names(self) -> Iterator[str]:
        return (f"{self.name}:{row}" for row in range(self.num_rows))


def read_documents(parts: Sequence[TextRows], keep: np.ndarray) -> Iterator[Document]:
    """The rows of `parts` for which `keep`, bool[rows of all parts], is True; rows without text are left out."""
    start = 0
    for part in parts:
        for row, text in part.read(keep[start : start + part.num_rows]):
            if text:
                yield Document(f"{part.name}:{row}", text)
        start += part.num_rows


def training_split(splits: dict[str, list[TextRows]], source: str) -> list[TextRows]:
    """The rows of the split `train`, or of the only split; raises DataError when there is neither."""
    return _chosen(splits, ("train",), source)


def evaluation_split(splits: dict[str, list[TextRows]], source: str) -> list[TextRows]:
    """The rows of the split `validation`, else of `test`, or of the only split; raises DataError when there is none."""
    return _chosen(splits, ("validation", "test"), source)


def files_by_split(root: Path, is_data: Callable[[str], bool]) -> dict[str, list[tuple[str, Path]]]:
    """Names and paths of the data files below the folder `root`, in the order of their names, by their split.

    A file belongs to the split whose name stands, with no letter beside it, in its path below the folder (the first
    such name, if there are several), and to `train` if none does. If `root` is a single file, it has the split `train`.
    Hidden files and folders are left out, and so are files whose names `is_data` rejects.
    """
    if root.is_file():
        return {"train": [(root.name, root)]}
    splits: dict[str, list[tuple[str, Path]]] = {}
    for name, path in files_below(root, skip=is_hidden):
        if is_data(path.name):
            found = _SPLIT_NAME.search(name.lower())
            splits.setdefault(_SPLITS[found[1]] if found else "train", []).append((name, path))
    return splits


def json_text(value: dict[str, Any], column: str, where: str) -> str:
    """The text that a JSON object has under the key `column`, empty for null; errors (DataError) begin with `where`."""
    if column not in value:
        raise DataError(
            f"{where} has no key {column!r} (data.text_column={column}). It has "
            f"{', '.join(map(repr, list(value)[:20])) or 'no keys'}. Set data.text_column to the one with the text."
        )
    text = value[column]
    if text is not None and not isinstance(text, str):
        raise DataError(
            f"{where}: {column!r} holds a {type(text).__name__}, and must hold a string. Set data.text_column to the "
            "key with the text."
        )
    try:
        (text or "").encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: {column!r} holds half a surrogate pair, which is no character.") from error
    return text or ""


def _chosen(splits: dict[str, list[TextRows]], wanted: tuple[str, ...], source: str) -> list[TextRows]:
    if len(splits) == 1:
        return next(iter(splits.values()))
    for name in wanted:
        if name in splits:
            return splits[name]
    raise DataError(
        f"{source} has the splits {', '.join(map(repr, splits))}, and none is {' or '.join(map(repr, wanted))}. Name "
        "the folder or the file of the split to read, which is below that folder."
    )
