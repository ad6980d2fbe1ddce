"""Examples: tokens, targets and weights of one sequence.

Invariant: an example depends on its index and epoch alone, so that the loader can fetch any of them at any time, from
any thread.
"""

from typing import Protocol

import numpy as np

from fiddlex.data.staged_examples import StagedExamples, checked
from fiddlex.errors import DataError


class ExampleSource(Protocol):
    """Random access to examples of one shape: the interface between data and loader."""

    def __len__(self) -> int:
        """Number of examples in an epoch."""

    def example(self, index: int, *, epoch: int) -> dict[str, np.ndarray]:
        """Example `index` as it is in `epoch`; sources with masks draw new ones in each epoch.

        It has `tokens` int32[seq_len], `targets` int32[n] and `weights` float32[n], the weight of each target in the
        loss, and further inputs of the objective. All examples of a source have the same names, shapes and dtypes.
        """


class NextTokenExamples(StagedExamples):
    """Windows for next-token prediction: each token of the stream except the first is a target once.

    Window i reads seq_len + 1 tokens from i·seq_len on, so neighbouring windows share one token: the last target of one
    window is the first input of the next. Tokens at the end that do not fill a window are left out.
    """

    def __init__(self, tokens: np.ndarray, seq_len: int):
        check_seq_len(seq_len)
        self._tokens = tokens
        self._seq_len = seq_len

    def __len__(self) -> int:
        return max(len(self._tokens) - 1, 0) // self._seq_len

    def read(self, number: int) -> np.ndarray:
        start = number * self._seq_len
        return np.array(self._tokens[start : start + self._seq_len + 1])

    def prepare(self, sample: np.ndarray, index: int, *, epoch: int) -> dict[str, np.ndarray]:
        """Window `index`, the same in every epoch; all weights are 1."""
        return _padded(sample, seq_len=self._seq_len)


class HeldoutExamples:
    """Windows for evaluation: every token of the stream except the first is scored exactly once.

    Window i reads seq_len + 1 tokens from i·stride on; stride (`data.eval_stride`) 0 means seq_len. Without overlap
    these are the windows of `NextTokenExamples` and one for the remaining tokens. With a smaller stride, a window
    begins with tokens that the previous window has scored; here they are context only, at weight 0. Every target
    outside the first window then has at least seq_len − stride tokens of context. The last window is padded with token
    0 at weight 0.
    """

    def __init__(self, tokens: np.ndarray, seq_len: int, *, stride: int = 0):
        check_seq_len(seq_len)
        if not 0 <= stride <= seq_len:
            raise DataError(
                f"stride={stride} must be at least 0 and at most seq_len={seq_len}, or tokens between two windows "
                "would not be scored; set data.eval_stride."
            )
        self._tokens = tokens
        self._seq_len = seq_len
        self._stride = stride or seq_len

    def __len__(self) -> int:
        num_targets = len(self._tokens) - 1
        return 1 + -(-max(num_targets - self._seq_len, 0) // self._stride) if num_targets > 0 else 0

    def example(self, index: int, *, epoch: int) -> dict[str, np.ndarray]:
        """Window `index`, the same in every epoch; weights are 1 on targets that no previous window has."""
        start = checked(index, len(self)) * self._stride
        example = _padded(self._tokens[start : start + self._seq_len + 1], seq_len=self._seq_len)
        if index:
            example["weights"][: self._seq_len - self._stride] = 0
        return example


def as_int32(ids: np.ndarray) -> np.ndarray:
    """`ids` as int32; what int32 cannot hold becomes −1, which the loader finds to be outside of every vocabulary."""
    if ids.dtype.itemsize > 4:
        return np.where(ids == ids.astype(np.int32), ids, -1).astype(np.int32)
    return ids.astype(np.int32)


def _padded(window: np.ndarray, *, seq_len: int) -> dict[str, np.ndarray]:
    """Up to seq_len + 1 tokens as one example, padded where the stream ended."""
    filled = np.zeros(seq_len + 1, np.int32)
    filled[: len(window)] = as_int32(window)
    weights = (np.arange(1, seq_len + 1) < len(window)).astype(np.float32)
    return {"tokens": filled[:-1], "targets": filled[1:], "weights": weights}


def check_seq_len(seq_len: int) -> None:
    if seq_len < 1:
        raise DataError(f"seq_len={seq_len} must be at least 1; set model.seq_len.")
