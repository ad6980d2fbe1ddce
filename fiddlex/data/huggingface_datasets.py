"""The source `hf:PATH`: a local dataset of Hugging Face's `datasets`, by the libraries `datasets` and `pyarrow`.

PATH is a folder that `save_to_disk` wrote, or a folder (or one file) of Parquet, Arrow or JSON Lines files, the last of
which may be compressed. Invariants: nothing is downloaded and nothing is written, not even a cache; a batch of rows is
in memory at a time.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fiddlex.data.bad_lines import BadLineError
from fiddlex.data.tables import decode_line, json_object, numbered_lines
from fiddlex.data.text_rows import TextRows, files_by_split, json_text
from fiddlex.errors import DataError, installation
from fiddlex.files.compressed import lines, opened
from fiddlex.files.small_files import is_own_name, read_object

if TYPE_CHECKING:
    import pyarrow

_ROWS_AT_ONCE = 1024
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"  # the last bytes of Arrow's stream format
_SAVED = ("dataset_dict.json", "state.json")  # files that mark folders of save_to_disk
_NO_LIBRARY = f"reading datasets takes the extra `hf` ({installation('hf')}): "


def read_dataset(path: Path, column: str) -> dict[str, list[TextRows]]:
    """The splits of a dataset, with the rows of `column` (`data.text_column`), which must hold strings.

    The splits of a folder of `save_to_disk` have the names that it saved; one without splits is `train`.
    `files_by_split` tells those of other folders and files.
    """
    try:
        import datasets
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise DataError(f"hf:{path}: {_NO_LIBRARY}{error}.") from error
    if not path.exists():
        raise DataError(
            f"hf:{path}: there is no such folder. fiddlex reads local datasets and downloads none: save one with "
            "datasets.load_dataset(NAME).save_to_disk(FOLDER)."
        )
    if path.is_dir() and any((path / name).is_file() for name in _SAVED):
        with _damage(path):
            _check_saved(path)
            saved = datasets.load_from_disk(str(path), keep_in_memory=False)
        splits = saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
        return {str(name): [_saved_rows(split, path, str(name), column)] for name, split in splits.items()}
    files = files_by_split(path, lambda name: _reader(name) is not None)
    reader = _reader(f"{path.name}l" if path.suffix == ".json" else path.name)
    if not files or (path.is_file() and reader is None):
        raise DataError(
            f"hf:{path}: {'there is no dataset in the folder' if path.is_dir() else 'the file is no dataset'}. Give a "
            f"folder that save_to_disk of the library datasets wrote, or a folder of {', '.join(_READERS)} files."
        )
    return {
        split: [(_reader(file.name) or _json_rows)(name, file, column) for name, file in of_split]
        for split, of_split in files.items()
    }


def _check_saved(path: Path) -> None:
    """Raises ValueError when a folder of save_to_disk names files outside it, which `datasets` would follow.

    Raises OSError or ValueError, too, when the folder's description is missing or damaged.
    """
    folders, (of_splits, of_files) = [path], _SAVED
    if (path / of_splits).is_file():
        folders = [path / name for name in _names(read_object(path / of_splits).get("splits"), of_splits)]
    for folder in folders:
        described = read_object(folder / of_files).get("_data_files")
        files = described if isinstance(described, list) else [None]
        _names([each.get("filename") if isinstance(each, dict) else None for each in files], of_files)


def _names(names: Any, file: str) -> list[str]:
    """`names` if each is that of a file or folder beside `file`; raises ValueError when one is not."""
    if not isinstance(names, list):
        raise ValueError(f"{file} has no list of names")
    for name in names:
        if not is_own_name(name):
            raise ValueError(f"{file} names {name!r:.80}, which is not in its folder")
    return names


def _saved_rows(dataset: Any, path: Path, split: str, column: str) -> TextRows:
    """The rows of a `datasets.Dataset`."""
    for file in dataset.cache_files:
        _check_stream_end(Path(file["filename"]))
    where = f"hf:{path}, split {split}"
    schema = dataset.features.arrow_schema
    _check_column(schema, column, where)

    def batches() -> Iterator["pyarrow.ChunkedArray"]:
        for table in dataset.select_columns([column]).with_format("arrow").iter(batch_size=_ROWS_AT_ONCE):
            yield table.column(column)

    return TextRows(split, dataset.num_rows, lambda keep: _texts(batches(), keep, path))


def _parquet_rows(name: str, path: Path, column: str) -> TextRows:
    import pyarrow.parquet

    def opened() -> "pyarrow.parquet.ParquetFile":  # anew for each reading: of a thousand files one at a time is open
        return pyarrow.parquet.ParquetFile(path, memory_map=True)

    with _damage(path), opened() as file:
        schema, num_rows = file.schema_arrow, file.metadata.num_rows
    _check_column(schema, column, str(path))

    def batches() -> Iterator["pyarrow.Array"]:
        with opened() as file:
            for batch in file.iter_batches(_ROWS_AT_ONCE, columns=[column], use_threads=False):
                yield batch.column(0)

    return TextRows(name, num_rows, lambda keep: _texts(batches(), keep, path))


def _arrow_rows(name: str, path: Path, column: str) -> TextRows:
    """The rows of an Arrow file in the file format, which has an index at its end, or in the stream format."""
    import pyarrow.ipc

    def opened() -> Iterator["pyarrow.RecordBatch"]:
        mapped = pyarrow.memory_map(str(path))
        if is_stream:
            yield from pyarrow.ipc.open_stream(mapped)
        else:
            reader = pyarrow.ipc.open_file(mapped)
            yield from (reader.get_batch(i) for i in range(reader.num_record_batches))

    with path.open("rb") as file:
        is_stream = file.read(6) != b"ARROW1"
    if is_stream:
        _check_stream_end(path)
    with _damage(path):
        mapped = pyarrow.memory_map(str(path))
        schema = (pyarrow.ipc.open_stream if is_stream else pyarrow.ipc.open_file)(mapped).schema
        _check_column(schema, column, str(path))
        num_rows = sum(batch.num_rows for batch in opened())

    def batches() -> Iterator["pyarrow.Array"]:
        for batch in opened():
            for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
                yield batch.column(column).slice(start, _ROWS_AT_ONCE)

    return TextRows(name, num_rows, lambda keep: _texts(batches(), keep, path))


def _json_rows(name: str, path: Path, column: str) -> TextRows:
    """The lines of a JSON Lines file that are not blank."""

    def numbered() -> Iterator[tuple[int, bytes]]:
        with opened(str(path)) as file:
            yield from numbered_lines(lines(file, str(path)), blank=b" \t\r\n")

    def read(keep: np.ndarray) -> Iterator[tuple[int, str]]:
        for row, (number, line) in enumerate(numbered()):
            if keep[row]:
                where = f"{path}, line {number}"
                try:
                    yield row, json_text(json_object(decode_line(line)), column, where)
                except BadLineError as error:
                    raise DataError(f"{where}: {error} Mend the line.") from error

    num_rows = sum(1 for _ in numbered())
    if num_rows:
        list(read(np.arange(num_rows) == 0))  # tells of a wrong column before anything is tokenized
    return TextRows(name, num_rows, read)


_READERS: dict[str, Callable[[str, Path, str], TextRows]] = {
    ".parquet": _parquet_rows,
    ".arrow": _arrow_rows,
    ".jsonl": _json_rows,
    ".jsonl.gz": _json_rows,
    ".jsonl.zst": _json_rows,
}


def _reader(name: str) -> Callable[[str, Path, str], TextRows] | None:
    """What reads a file of this name; None where it is no data file."""
    return next((reader for end, reader in _READERS.items() if name.endswith(end)), None)


def _texts(
    batches: "Iterator[pyarrow.Array | pyarrow.ChunkedArray]", keep: np.ndarray, path: Path
) -> Iterator[tuple[int, str]]:
    """Number and text of the rows of `batches` for which `keep`, bool[rows], is True."""
    import pyarrow

    start = 0
    with _damage(path):
        for strings in batches:
            strings.validate(full=True)  # or damaged offsets would be read from anywhere in memory
            if strings.type == pyarrow.string_view():  # pyarrow cannot filter these
                strings = strings.cast(pyarrow.large_string())
            kept = keep[start : start + len(strings)]
            texts = strings.filter(pyarrow.array(kept)).to_pylist()
            for row, text in zip((start + np.flatnonzero(kept)).tolist(), texts, strict=True):
                yield row, text or ""
            start += len(strings)


def _check_column(schema: "pyarrow.Schema", column: str, where: str) -> None:
    import pyarrow

    if schema.names.count(column) != 1:
        raise DataError(
            f"{where} has {'two columns' if column in schema.names else 'no column'} {column!r} (data.text_column="
            f"{column}). Its columns are {', '.join(map(repr, schema.names)) or 'none'}. Set data.text_column to the "
            "one with the text."
        )
    kind = schema.field(column).type
    values = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    if values not in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()):
        strings = [field.name for field in schema if field.type in (pyarrow.string(), pyarrow.large_string())]
        raise DataError(
            f"{where}: column {column!r} holds {kind}, and must hold strings (data.text_column={column}). Columns of "
            f"strings are {', '.join(map(repr, strings)) or 'none'}."
        )


def _check_stream_end(path: Path) -> None:
    """Raises DataError when a file in Arrow's stream format was cut; Arrow notices that only within a batch."""
    with path.open("rb") as file:
        file.seek(0, 2)
        size = file.tell()
        file.seek(max(0, size - len(_STREAM_END)))
        if file.read() != _STREAM_END:
            raise DataError(
                f"{path} has {size:,} bytes and no end mark: it was cut, or it is not a file of Arrow's stream format. "
                "Copy or write it again."
            )


@contextlib.contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Turns errors of the libraries into a DataError: they raise many kinds for damaged files, OSError among them."""
    try:
        yield
    except (DataError, PermissionError):
        raise
    except Exception as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise DataError(f"{path} is damaged, or not what its name says ({reason}). Copy or write it again.") from error
