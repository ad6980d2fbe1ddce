"""Lines of a TSV or JSONL file read into rows: the sources `tsv:PATH` and `jsonl:PATH`.

A TSV file is UTF-8. Its first line names the columns, tabs separate the cells, and quotes are ordinary characters, as
in the files of GLUE. A JSONL file has one object on each line. Lines end in LF or CRLF, which the last line may lack.
Blank lines and a byte order mark at the start are ignored.

Invariant: every line becomes a row or is bad. A bad line is an error that names file and line or, with
`data.skip_bad_lines`, is counted by its reason. The whole file is checked before its rows are used.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from fiddlex.data.bad_lines import MISSING_KEY, BadLineError, nearest
from fiddlex.data.documents import BYTE_ORDER_MARK
from fiddlex.errors import DataError
from fiddlex.files.places import absolute
from fiddlex.files.small_files import unique
from fiddlex.terminal.readable import counted, shown

T = TypeVar("T")
U = TypeVar("U")

UTF8_MARK = BYTE_ORDER_MARK.encode()
_LINE_REMEDY = "Mend the line, or set data.skip_bad_lines=True to pass over lines like it."
_KEYS_REMEDY = (
    "Where no line of the file has that key, name another key or another file; else mend the line, or set "
    "data.skip_bad_lines=True to pass over lines like it."
)


class UnfitFileError(DataError):
    """A file whose first line is already wrong, so that it may not be the file that the config was written for."""


@dataclasses.dataclass(frozen=True, eq=False)
class Table(Generic[T]):
    """The rows of a file."""

    source: str  # kind and absolute path, as in tsv:/data/train.tsv
    lines: Sequence[int]  # the number of each row's line in the file, from 1
    rows: Sequence[T]  # one row for each line that is not bad, in the order of the lines
    skip_bad_lines: bool  # whether bad lines are counted instead of raising an error
    skipped: Counter[str]  # number of skipped lines by reason

    def __len__(self) -> int:
        return len(self.rows)

    def convert(self, convert: Callable[[T], U]) -> "Table[U]":
        """The table of `convert(row)`, which may raise BadLineError; raises DataError as `read_table` does."""
        numbered = zip(self.lines, self.rows, strict=True)
        return _collect(self.source, numbered, convert, skip_bad_lines=self.skip_bad_lines, skipped=self.skipped)

    def select(self, indices: Sequence[int]) -> "Table[T]":
        """The rows with these indices, in a table that counts no skipped lines."""
        lines, rows = [self.lines[i] for i in indices], [self.rows[i] for i in indices]
        return dataclasses.replace(self, lines=lines, rows=rows, skipped=Counter())

    def describe(self) -> str:
        """A line for the log: 'tsv:/data/train.tsv: 1,200 lines, 3 passed over (2 empty text, 1 not UTF-8)'."""
        text = f"{self.source}: {counted(len(self), 'line')}"
        return f"{text}, {self.skipped.total():,} passed over ({_counts(self.skipped)})" if self.skipped else text


def read_table(
    source: str, parse: Callable[[Mapping[str, Any]], T], *, fields: Mapping[str, str], skip_bad_lines: bool
) -> Table[T]:
    """Reads and checks a whole file, 'tsv:PATH' or 'jsonl:PATH'.

    `parse` makes a row of a line's cells or keys, or raises BadLineError. For TSV it gets the columns in `fields`, for
    JSONL all keys of the object. `fields` has the columns that a TSV file must have, each with the config field that
    names it.

    Raises:
      DataError: at a bad line.
      UnfitFileError: when the file is missing, has no line or lacks a column, or its first line or every line is bad.
      OSError: when the file cannot be read.
    """
    kind, _, name = source.partition(":")
    path = absolute(name)
    source = f"{kind}:{path}"
    if not path.is_file():
        raise UnfitFileError(f"{source}: there is no such file{' but a folder' * path.is_dir()}. Check the path.")
    with path.open("rb") as file:
        lines = numbered_lines(file, blank=b" \r\n" if kind == "tsv" else b" \t\r\n")
        read = _tsv_reader(source, lines, fields) if kind == "tsv" else json_object
        return _collect(source, lines, lambda line: parse(read(decode_line(line))), skip_bad_lines=skip_bad_lines)


def _collect(
    source: str,
    items: Iterable[tuple[int, T]],
    convert: Callable[[T], U],
    *,
    skip_bad_lines: bool,
    skipped: Mapping[str, int] = Counter(),
) -> Table[U]:
    """The table of the converted items; `skipped` counts lines that were skipped earlier."""
    lines, rows, counts, first = list[int](), list[U](), Counter(skipped), ""
    for line, item in items:
        try:
            rows.append(convert(item))
            lines.append(line)
        except BadLineError as bad:
            message = f"{source}, line {line}: {bad}"
            if not skip_bad_lines:
                is_first = not lines
                raise (UnfitFileError if is_first else DataError)(
                    f"{message} {_KEYS_REMEDY if is_first and bad.reason == MISSING_KEY else _LINE_REMEDY}"
                ) from bad
            counts[bad.reason] += 1
            first = first or message
    if not rows:
        raise UnfitFileError(
            f"{source}: no line is left of {counts.total():,}: {_counts(counts)}. The first: {first} Where this holds "
            "for all lines, change what it names in the config, or name another file."
            if first
            else f"{source} has no lines of data. Write the file again, or name another."
        )
    return Table(source=source, lines=lines, rows=rows, skip_bad_lines=skip_bad_lines, skipped=counts)


def numbered_lines(file: Iterable[bytes], *, blank: bytes) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers, without line ends; lines of nothing but `blank` characters are left out."""
    for number, line in enumerate(file, 1):
        if number == 1:
            line = line.removeprefix(UTF8_MARK)
        if line.strip(blank):
            yield number, line.removesuffix(b"\n").removesuffix(b"\r")


def decode_line(line: bytes) -> str:
    if line.startswith(UTF8_MARK):  # that of the file itself is no part of its first line
        raise BadLineError(
            "begins with a byte order mark", "it begins with a byte order mark, as where files were joined. Remove it."
        )
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadLineError(
            "not UTF-8",
            f"byte 0x{line[error.start]:02x} at offset {error.start} is not UTF-8 ({error.reason}). Convert the file "
            "(iconv -t UTF-8).",
        ) from error


def json_object(line: str) -> dict[str, Any]:
    """The JSON object in a line; raises BadLineError when it is none."""
    value = json_value(line)
    if not isinstance(value, dict):
        raise BadLineError("not an object", f'{shown(value)} is not an object. Each line holds one: {{"key": "text"}}.')
    return value


def json_value(line: str) -> Any:
    """What a line of JSON holds; raises BadLineError when it is not JSON."""
    try:
        return json.loads(line, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:  # json raises a plain ValueError for numbers of thousands of digits
        where = f"{error.msg} at character {error.pos}" if isinstance(error, json.JSONDecodeError) else error
        raise BadLineError("not JSON", f"{shown(line)} is not JSON ({where}).") from error


def _tsv_reader(
    source: str, lines: Iterator[tuple[int, bytes]], fields: Mapping[str, str]
) -> Callable[[str], Mapping[str, str]]:
    """Reads the header from `lines`; returns a function that splits a line into the cells of `fields`."""
    number, line = next(lines, (0, b""))
    if not number:
        raise UnfitFileError(f"{source} is empty. Its first line must name the columns: {', '.join(fields)}.")
    try:
        header = decode_line(line).split("\t")
    except BadLineError as bad:
        raise UnfitFileError(f"{source}, line {number}: {bad}") from bad
    for name, named_by in fields.items():
        if header.count(name) != 1:
            fault, hint = ("two columns", "") if name in header else ("no column", f" {nearest(name, header)}")
            raise UnfitFileError(
                f"{source}, line {number}: the header names {fault} {name!r}, and {named_by} wants one.{hint} Set "
                f"{named_by}, or mend the header: the names of all columns, with tabs between them."
            )
    places = {name: header.index(name) for name in fields}

    def read(line: str) -> Mapping[str, str]:
        cells = line.split("\t")
        if len(cells) != len(header):
            raise BadLineError(
                "wrong number of columns",
                f"{shown(line)} has {counted(len(cells), 'column')}, and the header has {len(header)}.",
            )
        return {name: cells[place] for name, place in places.items()}

    return read


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in counts.most_common())
