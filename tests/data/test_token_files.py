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


def refusal(path, *, dtype="uint16", vocab_size):
    try:
        open_token_file(path, dtype=dtype, vocab_size=vocab_size)
    except DataError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("length", "vocab_size"), [(50, 256), (5_000, 50_257), (300_001, 50_257), (5_000, 128_256)])
def test_uint32_ids_read_as_uint16_are_refused(tmp_path, length, vocab_size):
    ids = np.random.default_rng(length).integers(10, min(vocab_size, 65_536), length)
    path = tmp_path / "train.bin"
    ids.astype("<u4").tofile(path)
    assert len(open_token_file(path, dtype="uint32", vocab_size=vocab_size)) == length
    message = refusal(path, vocab_size=vocab_size)
    assert message.startswith(f"tokens:{path} was made of uint32 ids, and data.token_dtype=uint16 cuts each in two: ")
    assert "Set data.token_dtype=uint32." in message
    ids.astype("<u2").tofile(path)
    assert len(open_token_file(path, dtype="uint16", vocab_size=vocab_size)) == length


def test_uint32_ids_beyond_16_bits_are_told_by_their_small_upper_halves(tmp_path):
    ids = np.random.default_rng(0).integers(0, 128_256, 5_000)
    ids.astype("<u4").tofile(tmp_path / "train.bin")
    message = refusal(tmp_path / "train.bin", vocab_size=128_256)
    assert "the second is never above 1, the first up to 65," in message


def test_uint16_ids_read_as_uint32_are_outside_the_vocabulary(tmp_path):
    ids = np.random.default_rng(0).integers(0, 50_257, 5_000)
    ids.astype("<u2").tofile(tmp_path / "train.bin")
    for vocab_size in (50_257, 128_256):
        message = refusal(tmp_path / "train.bin", dtype="uint32", vocab_size=vocab_size)
        assert f"outside the vocabulary of model.vocab_size={vocab_size}" in message
        assert "Either the file is not of data.token_dtype=uint32" in message


@pytest.mark.parametrize(
    "ids",
    [
        np.zeros(10_000),
        np.repeat([7, 0], 5_000),  # half of a file is padding
        np.where(np.arange(10_000) == 5_001, 7, np.arange(10_000) % 2 == 0),  # one id on the other side
        np.where(np.random.default_rng(0).random(10_000) < 0.01, 7, 0),  # nearly all ids are 0
        np.tile([7, 0], 39),  # too short to tell
        np.append(np.tile([7, 0], 5_000), 7),  # as the message advises
    ],
)
def test_files_of_many_zeros_are_not_taken_for_uint32_ids(tmp_path, ids):
    ids.astype("<u2").tofile(tmp_path / "train.bin")
    assert refusal(tmp_path / "train.bin", vocab_size=256) is None


def test_the_whole_file_is_looked_at_and_little_of_it(tmp_path, monkeypatch):
    """Halves at the start alone, as of a file whose first documents use few tokens, prove nothing."""
    monkeypatch.setattr(token_files, "_PIECE_TOKENS", 16)
    ids = np.tile([7, 0], 50_000)
    ids[50_000:] = 7
    ids.astype("<u2").tofile(tmp_path / "train.bin")
    assert refusal(tmp_path / "train.bin", vocab_size=256) is None
    ids[50_000:] = np.tile([7, 0], 25_000)
    ids.astype("<u2").tofile(tmp_path / "train.bin")
    assert "of 512 pairs of tokens from the whole file" in refusal(tmp_path / "train.bin", vocab_size=256)
