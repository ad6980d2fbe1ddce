"""The source `array_record:PATH`: ArrayRecord files, whose records are texts or JSON objects with a text.

Grain reads the files (https://github.com/google/array_record). The first record of a file decides for all its records:
if it is a JSON object, each record is an object that has the text column, else each record is a UTF-8 text.
"""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grain
import numpy as np

from fiddlex.data.bad_lines import BadLineError
from fiddlex.data.tables import decode_line, json_object
from fiddlex.data.text_rows import TextRows, files_by_split, json_text
from fiddlex.errors import DataError

_READ_AT_ONCE = 256  # records
_SUPPORTED = (
    "A record is a UTF-8 text or a JSON object with a text. Decode other records (a tf.Example, an array of tokens) "
    "and write their texts with array_record's writer, or write token ids as a file for tokens:PATH."
)


def read_array_records(path: Path, column: str) -> dict[str, list[TextRows]]:
    """The ArrayRecord file `path`, or every file below the folder `path` with `.array_record` in its name, by split.

    Where records are JSON objects, `column` (`data.text_column`) is the key of the text.
    """
    if not path.exists():
        raise DataError(f"array_record:{path}: there is no such file or folder. Check the path.")
    splits = files_by_split(path, lambda name: ".array_record" in name)
    if not splits:
        raise DataError(
            f"array_record:{path}: the folder has no file with .array_record in its name. Give a file, or a folder "
            "with such files at any depth."
        )
    return {split: [_rows(name, file, column) for name, file in files] for split, files in splits.items()}


def _rows(name: str, path: Path, column: str) -> TextRows:
    records = _Records(path)
    is_json = len(records) > 0 and _json_or_none(records.read([0])[0]) is not None

    def read(keep: np.ndarray) -> Iterator[tuple[int, str]]:
        wanted = np.flatnonzero(keep).tolist()
        with contextlib.closing(records):
            for start in range(0, len(wanted), _READ_AT_ONCE):
                some = wanted[start : start + _READ_AT_ONCE]
                for number, record in zip(some, records.read(some), strict=True):
                    where = f"{path}, record {number}"
                    yield number, _text_of(record, column, where) if is_json else _text(record, where)

    if len(records):
        list(read(np.arange(len(records)) == 0))  # tells of records of another kind before anything is tokenized
    return TextRows(name, len(records), read)


class _Records:
    """The records of a file; any error of the library that reads it becomes a DataError."""

    def __init__(self, path: Path):
        self._path = path
        with path.open("rb"):  # raises OSError, which tells the reason, when the file may not be read
            pass
        try:
            self._source = grain.sources.ArrayRecordDataSource(str(path))
        except (ImportError, AttributeError) as error:
            raise DataError(f"{path}: grain cannot read ArrayRecord files on this system ({error}).") from error
        except Exception as error:
            raise self._damaged(error) from error

    def __len__(self) -> int:
        return len(self._source)

    def read(self, numbers: list[int]) -> list[bytes]:
        try:
            return [bytes(record) for record in self._source.__getitems__(numbers)]
        except Exception as error:
            raise self._damaged(error) from error

    def close(self) -> None:
        """Closes the file, which the next `read` opens again: of a thousand files one at a time is open."""
        self._source.__exit__(None, None, None)

    def _damaged(self, error: Exception) -> DataError:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        return DataError(f"{self._path} is not an ArrayRecord file, or is damaged ({reason}). Copy or write it again.")


def _text(record: bytes, where: str) -> str:
    if _is_tf_example(record):
        raise DataError(f"{where} is a tf.Example protocol buffer, which fiddlex does not read. {_SUPPORTED}")
    try:
        return record.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where} is not UTF-8: byte 0x{record[error.start]:02x} at offset {error.start}. {_SUPPORTED}"
        ) from error


def _text_of(record: bytes, column: str, where: str) -> str:
    value = _json_or_none(record)
    if value is None:
        raise DataError(f"{where} is not a JSON object, and record 0 of the file is one. {_SUPPORTED}")
    return json_text(value, column, where)


def _json_or_none(record: bytes) -> dict[str, Any] | None:
    if not record.lstrip().startswith(b"{"):
        return None
    try:
        return json_object(decode_line(record))
    except BadLineError:
        return None


def _is_tf_example(record: bytes) -> bool:
    """Whether a record is a tf.Example, of which small ones are valid UTF-8 too.

    It is one field (tag 0x0A, the length) that reaches to the end, and has a field (0x0A) with a value (0x12) for each
    feature.
    """
    start = re.match(rb"\n([\x80-\xff]{0,4}[\0-\x7f])\n", record)
    length = sum((byte & 0x7F) << 7 * i for i, byte in enumerate(start[1])) if start else 0
    return start is not None and length == len(record) - start.end(1) and b"\x12" in record
