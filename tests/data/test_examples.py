import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fiddlex.data import HeldoutExamples, NextTokenExamples
from fiddlex.errors import DataError

LENGTHS = st.integers(0, 60)
SEQ_LENS = st.integers(1, 12)


def scored(source) -> list[int]:
    """All targets of weight 1, in order, after checking each example's form."""
    targets = []
    for index in range(len(source)):
        example = source.example(index, epoch=0)
        assert {name: values.dtype for name, values in example.items()} == {
            "tokens": np.int32,
            "targets": np.int32,
            "weights": np.float32,
        }
        assert len({values.shape for values in example.values()}) == 1
        real = example["weights"] == 1
        assert (real | (example["weights"] == 0)).all()
        np.testing.assert_array_equal(example["tokens"][real] + 1, example["targets"][real])
        assert not example["targets"][~real].any()
        targets += example["targets"][real].tolist()
    return targets


@given(length=LENGTHS, seq_len=SEQ_LENS)
def test_training_windows_score_each_token_at_most_once(length, seq_len):
    source = NextTokenExamples(np.arange(length, dtype=np.uint16), seq_len)
    assert scored(source) == list(range(1, len(source) * seq_len + 1))
    left = max(length - 1, 0) - len(source) * seq_len
    assert 0 <= left < seq_len


@given(length=LENGTHS, seq_len=SEQ_LENS)
def test_heldout_windows_score_each_token_exactly_once(length, seq_len):
    source = HeldoutExamples(np.arange(length, dtype=np.uint8), seq_len)
    assert scored(source) == list(range(1, length))


def test_a_window():
    example = NextTokenExamples(np.arange(10, 20, dtype=np.uint8), 3).example(1, epoch=5)
    assert example["tokens"].tolist() == [13, 14, 15]
    assert example["targets"].tolist() == [14, 15, 16]
    assert example["weights"].tolist() == [1, 1, 1]


def test_the_last_heldout_window():
    example = HeldoutExamples(np.arange(10, 15, dtype=np.uint8), 3).example(1, epoch=0)
    assert example["tokens"].tolist() == [13, 14, 0]
    assert example["targets"].tolist() == [14, 0, 0]
    assert example["weights"].tolist() == [1, 0, 0]


@pytest.mark.parametrize("kind", [NextTokenExamples, HeldoutExamples])
def test_bounds(kind):
    source = kind(np.arange(9), 4)
    assert len(source) == 2
    for index in (-1, 2):
        with pytest.raises(IndexError, match=f"example {index} of 2"):
            source.example(index, epoch=0)
    with pytest.raises(DataError, match=r"seq_len=0 must be at least 1; set model\.seq_len"):
        kind(np.arange(9), 0)
