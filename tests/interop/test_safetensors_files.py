"""Files of tensors: ours and the safetensors library's read each other's, and no damage goes unnoticed."""

import json
import pathlib
import random

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from fiddlex.errors import CheckpointError
from fiddlex.interop.safetensors_files import DTYPES, INDEX, SINGLE, Tensor, TensorFolder, read_header, write_folder

Arrays = dict[str, np.ndarray]


def arrays(seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    return {
        "a.weight": rng.normal(size=(3, 4)).astype(np.float32),
        "b": rng.normal(size=(5,)).astype(np.float16),
        "scalar": np.array(7, np.int64),
        "empty": np.zeros((0, 3), np.float32),
        "half": rng.normal(size=(2, 2)).astype(ml_dtypes.bfloat16),
    }


def write(folder: pathlib.Path, values: Arrays, **options: int) -> None:
    folder.mkdir(exist_ok=True)
    tensors = [Tensor(name, x.shape, x.dtype, lambda x=x: x) for name, x in values.items()]  # type: ignore[misc]
    write_folder(folder, tensors, **options)


def same(folder: TensorFolder, values: Arrays) -> None:
    assert folder.places.keys() == values.keys()
    for name, x in values.items():
        assert folder[name].dtype == x.dtype
        assert folder[name].shape == x.shape
        assert folder[name].tobytes() == x.tobytes()


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 3), max_size=3)),
        max_size=5,
    ),
    st.integers(1, 200),
)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, layout, most_bytes: int) -> None:
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("folder")
    values = {name: rng.integers(0, 2, shape).astype(DTYPES[dtype]) for name, (dtype, shape) in layout.items()}
    write(folder, values, most_bytes=most_bytes)
    same(TensorFolder(folder), values)
    assert not list(folder.glob("*.tmp"))


def test_the_library_reads_ours_and_we_read_the_librarys(tmp_path: pathlib.Path) -> None:
    values = arrays()
    write(tmp_path, values)
    read = safetensors.numpy.load_file(tmp_path / SINGLE)
    assert {name: x.tobytes() for name, x in read.items()} == {name: x.tobytes() for name, x in values.items()}
    safetensors.numpy.save_file(values, tmp_path / SINGLE, metadata={"format": "pt"})
    same(TensorFolder(tmp_path), values)


def test_several_files_have_an_index(tmp_path: pathlib.Path) -> None:
    values = arrays()
    write(tmp_path, values, most_bytes=40)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in values.values())
    for name, file in index["weight_map"].items():
        assert safetensors.numpy.load_file(tmp_path / file)[name].tobytes() == values[name].tobytes()
    same(TensorFolder(tmp_path), values)


def test_a_file_cut_at_any_byte_is_refused(tmp_path: pathlib.Path) -> None:
    write(tmp_path, arrays())
    whole = (tmp_path / SINGLE).read_bytes()
    for length in range(len(whole)):
        (tmp_path / SINGLE).write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="is not a safetensors file, or is damaged"):
            TensorFolder(tmp_path)
    (tmp_path / SINGLE).write_bytes(whole + b"x")
    with pytest.raises(CheckpointError, match="its header tells of"):
        TensorFolder(tmp_path)


def test_a_damaged_header_is_refused_or_tells_of_places_in_the_file(tmp_path: pathlib.Path) -> None:
    write(tmp_path, arrays())
    whole, rng = (tmp_path / SINGLE).read_bytes(), random.Random(0)
    end = 8 + int.from_bytes(whole[:8], "little")
    refused = 0
    for _ in range(2000):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(end)] = rng.randrange(256)
        (tmp_path / SINGLE).write_bytes(damaged)
        try:
            places = read_header(tmp_path / SINGLE)
        except CheckpointError:
            refused += 1
            continue
        for name in places:
            TensorFolder(tmp_path)[name].tobytes()
    assert refused > 1000


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ([], "it is not a JSON object"),
        (
            {"a": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}},
            ".safetensors: a has dtype 'F8_E4M3', as in",
        ),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, "a has shape"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "a of shape"),
        ({"a": {"dtype": "U8", "shape": [2], "data_offsets": [2, 4]}}, "would be at bytes"),
        ({"a": {"dtype": "U8", "shape": [2], "data_offsets": [2, 0]}}, "its header has"),
        ({"a": {"dtype": "U8", "shape": [10**30, 10**30], "data_offsets": [0, 4]}}, "a has shape"),
        ({"a": {"dtype": "U8", "shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}}, "a has shape"),
        ({"a": {"dtype": "U8", "shape": [1] * 33, "data_offsets": [0, 1]}}, "a has shape"),
        ({"a": 3}, "its header has 3 for 'a'"),
    ],
)
def test_what_a_header_may_not_say(header: object, message: str, tmp_path: pathlib.Path) -> None:
    text = json.dumps(header).encode()
    (tmp_path / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + b"1234")
    with pytest.raises(CheckpointError) as error:
        TensorFolder(tmp_path)
    assert message in str(error.value)


def test_a_header_longer_than_the_file_is_not_read(tmp_path: pathlib.Path) -> None:
    (tmp_path / SINGLE).write_bytes((2**63).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match="its header would have 9223372036854775808"):
        TensorFolder(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "is not an index of safetensors files"),
        ('{"weight_map": 3}', "is not an index of safetensors files"),
        ('{"weight_map": {"a": "../other"}}', "which is not a file of its folder"),
        ('{"weight_map": {"lost": "model.safetensors"}}', "says that lost is in model.safetensors, where it is not"),
    ],
)
def test_a_damaged_index_is_refused(index: str, message: str, tmp_path: pathlib.Path) -> None:
    write(tmp_path, arrays())
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(CheckpointError) as error:
        TensorFolder(tmp_path)
    assert message in str(error.value)


def test_of_two_saves_in_a_folder_neither_is_taken_for_the_other(tmp_path: pathlib.Path) -> None:
    """transformers reads model.safetensors, whatever else is there."""
    first, second = arrays(1), arrays(2)
    write(tmp_path, first, most_bytes=40)
    names = sorted({*json.loads((tmp_path / INDEX).read_text())["weight_map"].values()})
    write(tmp_path, second)
    with pytest.raises(
        CheckpointError, match=rf"has {SINGLE}, and {INDEX} with the {len(names)} files .* Remove it, or"
    ):
        TensorFolder(tmp_path)
    (tmp_path / names[1]).unlink()
    same(TensorFolder(tmp_path), second)
    (tmp_path / SINGLE).unlink()
    with pytest.raises(CheckpointError, match=f"lacks {names[1]}, of the {len(names)} files that .* Copy all of them"):
        TensorFolder(tmp_path)
    (tmp_path / names[0]).unlink()
    with pytest.raises(CheckpointError, match=f"lacks {names[0]} and 1 more, of"):
        TensorFolder(tmp_path)


def test_an_index_may_name_the_single_file(tmp_path: pathlib.Path) -> None:
    write(tmp_path, arrays())
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(arrays(), SINGLE)}))
    same(TensorFolder(tmp_path), arrays())


def test_a_file_that_cannot_be_read_is_not_called_damaged(tmp_path: pathlib.Path) -> None:
    (tmp_path / SINGLE).symlink_to(tmp_path / SINGLE)
    with pytest.raises(CheckpointError, match=rf"{SINGLE} cannot be read: Too many levels of symbolic links\.$"):
        read_header(tmp_path / SINGLE)


def test_a_folder_without_tensors_is_told(tmp_path: pathlib.Path) -> None:
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors nor"):
        TensorFolder(tmp_path)
