"""Files of text, cut into pieces that can be read apart from each other.

The name of a file tells its form: .jsonl and .json are JSON Lines, .parquet is Parquet, and any other file is the text
of one document. All but Parquet may be compressed, as .gz or .zst.

Invariant: the pieces, in their order, have every document of the files once, in the order of the files.
"""

import dataclasses
import glob
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fiddlex.config import rules
from fiddlex.data.bad_lines import BadLineError, checked_string, value_of
from fiddlex.data.documents import BYTE_ORDER_MARK, files_below, is_hidden
from fiddlex.data.tables import UTF8_MARK, decode_line, json_object
from fiddlex.errors import DataError, installation
from fiddlex.files.compressed import is_compressed, lines, opened, read_text

_LEAST_PIECE, _MOST_PIECES = 4 * 2**20, 4096  # bytes; pieces of one run, beside the files that cannot be cut
_PROBE = 8192  # bytes at the start of a file that tell whether it is text


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of the input."""

    files: tuple[str, ...]  # one file; several for texts, each of which is a document
    form: str  # 'text', 'jsonl' or 'parquet'
    first: int  # first byte of the lines of a JSON Lines file, or first row group of a Parquet file
    last: int  # lines that begin before this byte, or row groups before this one, belong to the piece
    num_bytes: int  # bytes of the files that the piece stands for
    passes_over: bool = False  # whether texts that are binary or not UTF-8 are left out; else they are an error


def find_files(inputs: Sequence[str]) -> list[tuple[str, bool]]:
    """The files that `inputs` name, and for each whether a folder brought it.

    An input is a file, a pattern such as data/*.jsonl, or a folder: of it all files that are not hidden, at any depth.
    """
    found: list[tuple[str, bool]] = []
    for each in inputs:
        rules.local_path("--input", each)
        path = os.path.expanduser(each)
        matches = [path] if os.path.exists(path) else sorted(glob.glob(path, recursive=True))
        files = [(file, os.path.isdir(match)) for match in matches for file in _files(match)]
        if not files:
            raise DataError(f"--input={each}: there is no such file, or none in it. Name files, folders or patterns.")
        found += files
    named = [os.path.realpath(file) for file in map(os.path.expanduser, inputs) if os.path.isfile(file)]
    if twice := next((file for file in named if named.count(file) > 1), None):
        raise DataError(f"--input names {twice} twice, and each file is prepared once. Name it once.")
    once: dict[str, tuple[str, bool]] = {}  # a pattern such as data/** matches a folder and the files in it
    for file, in_folder in found:
        path = os.path.realpath(file)
        once[path] = file, in_folder and once.get(path, ("", True))[1]  # a file that is named must be a text
    return list(once.values())


def _files(path: str) -> list[str]:
    if not os.path.isdir(path):
        if not os.path.isfile(path):
            raise DataError(
                f"--input={path} is neither a file nor a folder, but a pipe or a device. Write it to a file."
            )
        return [path]
    return [str(file) for _, file in files_below(Path(path), skip=is_hidden)]


def cut(files: Sequence[tuple[str, bool]]) -> list[Piece]:
    """The pieces of `files`, which depend on the files' names and sizes, and on the row groups of Parquet, alone."""
    sizes = {file: os.path.getsize(file) for file, _ in files}
    size = max(_LEAST_PIECE, sum(sizes.values()) // _MOST_PIECES)
    pieces: list[Piece] = []
    for file, passes_over in files:
        form = _form(file)
        if is_compressed(file) and not sizes[file]:
            raise DataError(f"{file} is truncated: it has 0 bytes, and a compressed file has a header. Copy it again.")
        if form == "text":
            _add_text(pieces, file, sizes[file], most=size, passes_over=passes_over)
        elif form == "jsonl":
            edges = (
                [*range(0, sizes[file], sizes[file] if is_compressed(file) else size), sizes[file]]
                if sizes[file]
                else []
            )
            pieces += [Piece((file,), form, a, b, b - a) for a, b in itertools.pairwise(edges)]
        else:
            pieces += _row_groups(file, sizes[file], size)
    return pieces


def _form(file: str) -> str:
    stem, end = os.path.splitext(file.lower())
    end = os.path.splitext(stem)[1] if is_compressed(file) else end
    return {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}.get(end, "text")


def _add_text(pieces: list[Piece], file: str, size: int, *, most: int, passes_over: bool) -> None:
    """Adds a file to the last piece, if that is of texts and has room, or makes a new piece."""
    before = pieces[-1] if pieces else None
    if before and before.form == "text" and before.num_bytes + size <= most and before.passes_over == passes_over:
        files, num_bytes = (*before.files, file), before.num_bytes + size
        pieces[-1] = dataclasses.replace(before, files=files, num_bytes=num_bytes)
    else:
        pieces.append(Piece((file,), "text", 0, 0, size, passes_over))


def _row_groups(file: str, size: int, most: int) -> list[Piece]:
    with _parquet(file) as parquet:
        groups = parquet.num_row_groups
    step = max(1, groups * most // max(size, 1))
    edges = [*range(0, groups, step), groups]
    return [Piece((file,), "parquet", a, b, size * (b - a) // groups) for a, b in itertools.pairwise(edges)]


def read_piece(piece: Piece, key: str) -> Iterator[str | None]:
    """Yields the texts of a piece, and None for each file that it passes over; `key` is the key or column of the texts.

    Raises:
      DataError: names the file and line that is damaged, not UTF-8, no JSON object, or without a text.
    """
    if piece.form == "text":
        return (_read_text(file, piece.passes_over) for file in piece.files)
    return _read_lines(piece, key) if piece.form == "jsonl" else _read_rows(piece, key)


def _read_text(file: str, passes_over: bool) -> str | None:
    with opened(file) as stream:
        data = read_text(stream, file)
    try:
        if passes_over and b"\0" in data[:_PROBE]:
            return None
        return data.decode("utf-8").removeprefix(BYTE_ORDER_MARK)
    except UnicodeDecodeError as error:
        if passes_over:
            return None
        raise DataError(
            f"{file} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start} ({error.reason}). Convert it "
            "(iconv -t UTF-8)."
        ) from error


def _read_lines(piece: Piece, key: str) -> Iterator[str]:
    (file,) = piece.files
    whole = is_compressed(file)
    with opened(file) as stream:
        position = piece.first
        if position:  # the line that begins before the piece belongs to the piece before
            stream.seek(position - 1)
            position += len(stream.readline()) - 1
        for number, line in enumerate(lines(stream, file), 1):
            if not whole and position >= piece.last:
                break
            content = line if position else line.removeprefix(UTF8_MARK)
            if content.strip():
                try:
                    yield _text_of(content, key)
                except BadLineError as error:
                    before = 0 if whole else _lines_before(file, position) - number + 1
                    raise DataError(
                        f"{file}, line {before + number}: {error} The text is under {key!r} (--json_key)."
                    ) from error
            position += len(line)


def _text_of(line: bytes, key: str) -> str:
    text = checked_string(value_of(json_object(decode_line(line.rstrip(b"\r\n"))), key), key)
    if b"\\u" in line:  # half of a pair of escapes is no character
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _lines_before(file: str, position: int) -> int:
    """The number of lines that end before byte `position`."""
    count = 0
    with open(file, "rb") as stream:
        while position > 0 and (chunk := stream.read(min(position, 2**22))):
            count += chunk.count(b"\n")
            position -= len(chunk)
    return count


def _read_rows(piece: Piece, key: str) -> Iterator[str]:
    (file,) = piece.files
    with _parquet(file) as parquet:
        if key not in parquet.schema_arrow.names:
            raise DataError(
                f"{file} has no column {key!r}; it has {', '.join(parquet.schema_arrow.names[:20])}. Set --json_key."
            )
        row = 0
        for group in range(piece.first, piece.last):
            for batch in parquet.iter_batches(batch_size=1024, row_groups=[group], columns=[key]):
                batch.column(0).validate(full=True)
                for text in batch.column(0).to_pylist():
                    row += 1
                    if not isinstance(text, str):
                        raise DataError(
                            f"{file}, row {row} of the row groups from {piece.first} on: column {key!r} has "
                            f"{text!r:.40} and not a text. Set --json_key to a column of strings."
                        )
                    yield text


class _parquet:  # noqa: N801  # reads as a function
    """Opens a Parquet file and turns errors of pyarrow into DataErrors. A context manager."""

    def __init__(self, file: str):
        self._file = file

    def __enter__(self) -> Any:
        try:
            import pyarrow.parquet
        except ImportError as error:
            raise DataError(
                f"{self._file}: to read Parquet install the extra parquet ({installation('parquet')})."
            ) from error
        try:
            self._parquet = pyarrow.parquet.ParquetFile(self._file)
        except (pyarrow.ArrowException, OSError) as error:
            self._fail(error)
        return self._parquet

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: object) -> None:
        self._parquet.close()
        if value is not None and (type(value).__module__.startswith("pyarrow") or isinstance(value, OSError)):
            self._fail(value)

    def _fail(self, error: BaseException) -> None:
        raise DataError(
            f"{self._file} is no Parquet file, or is damaged: {str(error).splitlines()[0]}. Copy it again."
        ) from error
