"""Reads and writes folders of `.safetensors` files, one tensor at a time.

A file is the length of its header (8 bytes, little-endian), the header (JSON: for each tensor its dtype, shape and the
place of its bytes), and the bytes. A folder has one file, `model.safetensors`, or several with an index
(`model.safetensors.index.json`) that names the file of each tensor. Tensors are read in place, as views of a file that
is mapped into memory, and written as they are made: no folder is ever in memory as a whole. The library safetensors,
version 0.8.0, copies each tensor that it reads, and writes a file from tensors that are all in memory.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from fiddlex.errors import CheckpointError
from fiddlex.files.small_files import is_own_name, json_object, read_object
from fiddlex.files.whole_files import replacing
from fiddlex.terminal.readable import shortened, shown

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MOST_HEADER = 100_000_000  # bytes; the limit of the safetensors library
MOST_DIMS = 32  # of a tensor; numpy's arrays have up to 64, and those before numpy 2 up to 32
DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Place(NamedTuple):
    """Where a tensor is: its file, dtype, shape, and the offset of its first byte in the file."""

    file: Path
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int


class TensorFolder:
    """The tensors of a folder, read in place.

    Raises:
      CheckpointError: when a file is missing, damaged or of a dtype that is none of `DTYPES`, or `model.safetensors`
        stands beside the files of an index, perhaps of another model.
    """

    def __init__(self, folder: Path):
        self.places = _places(folder)  # each tensor's place, by its name
        self._mapped: dict[Path, np.memmap[Any, Any]] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        place = self.places[name]
        if place.file not in self._mapped:
            self._mapped[place.file] = np.memmap(place.file, np.uint8, mode="r")
        size = math.prod(place.shape) * place.dtype.itemsize
        view: np.ndarray = self._mapped[place.file][place.offset : place.offset + size]
        return view.view(place.dtype).reshape(place.shape)


def _places(folder: Path) -> dict[str, Place]:
    """The places of the tensors of a folder.

    A save leaves the files of an earlier one where they are. transformers reads `model.safetensors` whatever else is
    there, and so does this function where the index has lost a file.
    """
    single, index = folder / SINGLE, folder / INDEX
    if not index.exists():
        if not single.exists():
            raise CheckpointError(
                f"{folder} has neither {SINGLE} nor {INDEX}. Name a folder that transformers' save_pretrained wrote; "
                "to convert a pytorch_model.bin, load it with transformers and save it again."
            )
        return read_header(single)
    files = _weight_map(index)
    names = sorted(set(files.values()))
    lacking = [name for name in names if not (folder / name).exists()]
    if single.exists() and names != [SINGLE]:
        if lacking:
            return read_header(single)
        raise CheckpointError(
            f"{folder} has {SINGLE}, and {INDEX} with the {len(names)} files that it names: two saves, perhaps of two "
            f"models. transformers reads {SINGLE}. Remove it, or remove {INDEX}."
        )
    if lacking:
        more = f" and {len(lacking) - 1} more" if lacking[1:] else ""
        raise CheckpointError(
            f"{folder} lacks {lacking[0]}{more}, of the {len(names)} files that {INDEX} names. Copy all of them there."
        )
    return _indexed(folder, files)


def read_header(file: Path) -> dict[str, Place]:
    """The places of a file's tensors; reads the header alone."""
    try:
        size = file.stat().st_size
        if size < 8:  # before the file is opened, since a pipe would let the reader wait
            raise ValueError(f"it has {size} bytes, fewer than the length of its header")
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > min(size - 8, MOST_HEADER):
                raise ValueError(f"it has {size} bytes, and its header would have {length}")
            header = json_object(stream.read(length))
        header.pop("__metadata__", None)
        return _checked(file, header, first=8 + length, size=size)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:  # those of JSON and UTF-8 too
        raise CheckpointError(f"{file} is not a safetensors file, or is damaged: {error}. Copy it again.") from error


def _checked(file: Path, header: dict[str, Any], *, first: int, size: int) -> dict[str, Place]:
    places, end = {}, first
    for name, entry in sorted(header.items(), key=_begin):
        begin, stop = (first + offset for offset in entry["data_offsets"])
        shape = entry["shape"]
        if entry["dtype"] not in DTYPES:
            raise CheckpointError(
                f"{file}: {shortened(name)} has dtype {shown(entry['dtype'])}, as in quantized models. fiddlex reads "
                f"{', '.join(DTYPES)}. Save the model in one of these with transformers."
            )
        if not _is_shape(shape):
            raise ValueError(f"{shortened(name)} has shape {shown(shape)}")
        dtype = DTYPES[entry["dtype"]]
        if begin != end or stop - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(
                f"{shortened(name)} of shape {shown(shape)} would be at bytes {shown(begin)} to {shown(stop)}, after "
                f"byte {end}"
            )
        places[name], end = Place(file, dtype, tuple(shape), begin), stop
    if end != size:
        raise ValueError(f"it has {size} bytes, and its header tells of {end}")
    return places


def _is_shape(shape: Any) -> bool:
    """Whether numpy has arrays of this shape, also where a size of 0 hides how large the others are."""
    if not isinstance(shape, list) or len(shape) > MOST_DIMS:
        return False
    return all(type(each) is int and 0 <= each < 2**63 for each in shape) and math.prod(filter(None, shape)) < 2**60


def _begin(item: tuple[str, Any]) -> tuple[int, int]:
    name, entry = item
    match entry:
        case {"dtype": str(), "shape": _, "data_offsets": [int(begin), int(end)]} if 0 <= begin <= end < 2**63:
            return int(begin), int(end)
    raise ValueError(f"its header has {shown(entry)} for {shown(name)}")


def _weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor that an index names."""
    try:
        files = read_object(index).get("weight_map")
        if not isinstance(files, dict):
            raise ValueError(f"its weight_map is {shown(files)}, and must be an object")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{index} is not an index of safetensors files: {error}. Copy it again.") from error
    if outside := [name for name in files.values() if not is_own_name(name)]:
        raise CheckpointError(f"{index} names {shown(outside[0])}, which is not a file of its folder. Copy it again.")
    return files


def _indexed(folder: Path, files: dict[str, str]) -> dict[str, Place]:
    """The places of all tensors, of which each is in its file of `files`."""
    headers = {name: read_header(folder / name) for name in sorted(set(files.values()))}
    lost = [name for name, file in files.items() if name not in headers[file]]
    if lost:
        raise CheckpointError(
            f"{folder / INDEX} says that {shortened(lost[0])} is in {files[lost[0]]}, where it is not. Copy both again."
        )
    return {name: headers[file][name] for name, file in files.items()}


class Tensor(NamedTuple):
    """A tensor to write: its name, shape and dtype, and the function that makes it when its turn comes."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    make: Callable[[], np.ndarray]

    @property
    def size(self) -> int:
        """Number of bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_folder(folder: Path, tensors: Sequence[Tensor], *, most_bytes: int = 5 * 10**9) -> None:
    """Writes tensors to files of at most `most_bytes`, or of one tensor that has more; several files get an index.

    Each file appears under its name once it is complete.
    """
    shards: list[list[Tensor]] = [[]]
    for tensor in tensors:
        if shards[-1] and sum(each.size for each in shards[-1]) + tensor.size > most_bytes:
            shards.append([])
        shards[-1].append(tensor)
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = [SINGLE]
    for name, shard in zip(names, shards, strict=True):
        _write_file(folder / name, shard)
    if len(shards) > 1:
        files = {each.name: name for name, shard in zip(names, shards, strict=True) for each in shard}
        index = {"metadata": {"total_size": sum(each.size for each in tensors)}, "weight_map": files}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_file(file: Path, tensors: Iterable[Tensor]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for this
    offset, tensors = 0, list(tensors)
    for each in tensors:
        header[each.name] = {
            "dtype": NAMES[each.dtype],
            "shape": list(each.shape),
            "data_offsets": [offset, offset + each.size],
        }
        offset += each.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that every tensor begins at a multiple of its element's size
    with replacing(file) as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for each in tensors:
            array = np.asarray(each.make(), each.dtype, order="C")
            assert array.shape == each.shape, (each.name, array.shape, each.shape)
            stream.write(array.reshape(-1).view(np.uint8).data)
