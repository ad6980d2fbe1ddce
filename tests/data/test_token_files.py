import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fiddlex.data import open_token_file, token_files
from fiddlex.errors import DataError


@given(
    dtype=st.sampled_from(["uint16", "uint32"]),
    ids=st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=50),
)
def test_round_trip(tmp_path_factory, dtype, ids):
    path = tmp_path_factory.mktemp("tokens") / "train.bin"
    np.array(ids, np.dtype(dtype).newbyteorder("<")).tofile(path)
    tokens = open_token_file(path, dtype=dtype, vocab_size=2**16)
    assert isinstance(tokens, np.memmap)
    assert not tokens.flags.writeable
    assert tokens.tolist() == ids


def test_files_are_little_endian(tmp_path):
    path = tmp_path / "train.bin"
    path.write_bytes(bytes([1, 0, 0, 0, 2, 1, 0, 0]))
    assert open_token_file(path, dtype="uint16", vocab_size=512).tolist() == [1, 0, 258, 0]
    assert open_token_file(path, dtype="uint32", vocab_size=512).tolist() == [1, 258]


@pytest.mark.parametrize(("dtype", "size"), [("uint16", 2), ("uint32", 4)])
def test_truncated_by_a_byte(tmp_path, dtype, size):
    path = tmp_path / "train.bin"
    path.write_bytes(bytes(10 * size - 1))
    with pytest.raises(DataError, match=rf"has {10 * size - 1} bytes, which is not a multiple of {size}, .*{dtype}.*"):
        open_token_file(path, dtype=dtype, vocab_size=256)


def test_missing(tmp_path):
    with pytest.raises(DataError, match=r"tokens:.*train\.bin: there is no such file\. Give .* prepare\.py of nanoGPT"):
        open_token_file(tmp_path / "train.bin", dtype="uint16", vocab_size=256)


def test_empty(tmp_path):
    (tmp_path / "train.bin").touch()
    with pytest.raises(DataError, match=r"train\.bin is empty \(0 bytes\)\. Write the tokens again"):
        open_token_file(tmp_path / "train.bin", dtype="uint16", vocab_size=256)


@pytest.mark.parametrize("position", [0, 9, 10, 99])
def test_outside_the_vocabulary(tmp_path, monkeypatch, position):
    monkeypatch.setattr(token_files, "_CHUNK_TOKENS", 10)
    ids = np.full(100, 255, "<u2")
    ids[position] = 256
    ids[99] = 300 if position < 99 else 256  # the first offender is the one that is told
    ids.tofile(tmp_path / "train.bin")
    message = rf"train\.bin: token {position} is 256, .*model\.vocab_size=256\..*data\.token_dtype=uint16"
    with pytest.raises(DataError, match=message):
        open_token_file(tmp_path / "train.bin", dtype="uint16", vocab_size=256)


def test_scan_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "SCANNED_TOKENS", 50)
    monkeypatch.setattr(token_files, "_CHUNK_TOKENS", 10)
    ids = np.zeros(100, "<u2")
    ids[50] = 256
    ids.tofile(tmp_path / "train.bin")
    assert len(open_token_file(tmp_path / "train.bin", dtype="uint16", vocab_size=256)) == 100


def test_largest_id_of_the_dtype_is_checked(tmp_path):
    np.array([0, 65535], "<u2").tofile(tmp_path / "train.bin")
    assert open_token_file(tmp_path / "train.bin", dtype="uint16", vocab_size=65536)[1] == 65535
    with pytest.raises(DataError, match=r"token 1 is 65535, outside the vocabulary of model\.vocab_size=65535"):
        open_token_file(tmp_path / "train.bin", dtype="uint16", vocab_size=65535)
