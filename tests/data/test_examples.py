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
        filler = np.arange(len(real)) > np.flatnonzero(real).max()
        assert not example["targets"][filler].any()
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


@given(length=LENGTHS, seq_len=SEQ_LENS, stride=st.integers(1, 12))
def test_overlapping_windows_score_each_token_exactly_once(length, seq_len, stride):
    stride = min(stride, seq_len)
    source = HeldoutExamples(np.arange(length, dtype=np.uint8), seq_len, stride=stride)
    assert scored(source) == list(range(1, length))
    for index in range(len(source)):
        example = source.example(index, epoch=0)
        first = int(np.argmax(example["weights"]))
        assert first == (seq_len - stride if index else 0)
        context = example["tokens"][: first + 1].tolist()
        assert context == list(range(index * stride, index * stride + first + 1))


@given(length=LENGTHS, seq_len=SEQ_LENS)
def test_stride_zero_is_no_overlap(length, seq_len):
    tokens = np.arange(length, dtype=np.uint8)
    plain, same = HeldoutExamples(tokens, seq_len), HeldoutExamples(tokens, seq_len, stride=seq_len)
    assert len(plain) == len(same) == -(-max(length - 1, 0) // seq_len)
    for index in range(len(plain)):
        for name, values in plain.example(index, epoch=0).items():
            np.testing.assert_array_equal(values, same.example(index, epoch=0)[name])
            padded = np.zeros(seq_len, values.dtype)
            window = tokens[index * seq_len : (index + 1) * seq_len + 1]
            part = {"tokens": window, "targets": window[1:], "weights": np.ones(len(window) - 1)}[name][:seq_len]
            padded[: len(part)] = part
            np.testing.assert_array_equal(values, padded)


def test_overlapping_windows():
    source = HeldoutExamples(np.arange(10, 19, dtype=np.uint8), 4, stride=3)
    examples = [source.example(i, epoch=0) for i in range(len(source))]
    assert [{name: values.tolist() for name, values in example.items()} for example in examples] == [
        {"tokens": [10, 11, 12, 13], "targets": [11, 12, 13, 14], "weights": [1, 1, 1, 1]},
        {"tokens": [13, 14, 15, 16], "targets": [14, 15, 16, 17], "weights": [0, 1, 1, 1]},
        {"tokens": [16, 17, 18, 0], "targets": [17, 18, 0, 0], "weights": [0, 1, 0, 0]},
    ]


@pytest.mark.parametrize("stride", [-1, 5])
def test_strides_that_leave_gaps(stride):
    with pytest.raises(DataError, match=rf"stride={stride} must be .* at most seq_len=4, .* data\.eval_stride"):
        HeldoutExamples(np.arange(9), 4, stride=stride)


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
