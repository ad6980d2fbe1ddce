import math

import numpy as np
import pytest

from fiddlex.data import ContinuationRows, score_continuations, wilson_interval
from fiddlex.errors import DataError


def rows_of(counts: list[int], labels: list[int], num_bytes: list[int], num_tokens: list[int]) -> ContinuationRows:
    first = np.cumsum([0, *counts])
    return ContinuationRows(
        num_bytes=np.array(num_bytes),
        num_tokens=np.array(num_tokens),
        first=first,
        labels=np.array(labels),
        has_choices=max(counts) > 1,
    )


def test_single_continuations():
    rows = rows_of([1, 1, 1], [0, 0, 0], num_bytes=[4, 8, 4], num_tokens=[1, 3, 2])
    scores = score_continuations(
        rows, log_likelihoods=np.array([-1.0, -4.0, -3.0], np.float32), num_correct=np.array([1, 2, 2])
    )
    low, high = wilson_interval(2, 3)
    assert scores == pytest.approx(
        {
            "lines": 3,
            "log_likelihood_per_token": -8 / 6,
            "log_likelihood_per_byte": -0.5,
            "perplexity": math.exp(8 / 6),
            "accuracy": 2 / 3,
            "accuracy_low": low,
            "accuracy_high": high,
        }
    )


CHOICES = rows_of([2, 3], [0, 1], num_bytes=[2, 8, 4, 1, 2], num_tokens=[1, 1, 2, 1, 2])
LOG_LIKELIHOODS = np.array([-2.0, -4.0, -3.0, -2.0, -2.5])


def test_choices():
    # By the totals both lines are right; per byte (-1 and -0.5; -0.75, -2 and -1.25) none is; per token the first.
    scores = score_continuations(CHOICES, log_likelihoods=LOG_LIKELIHOODS, num_correct=np.zeros(5))
    assert scores == pytest.approx(
        {
            "lines": 2,
            "log_likelihood_per_token": -4 / 2,
            "log_likelihood_per_byte": -4 / 3,
            "perplexity": math.exp(2),
            "accuracy": 1,
            "accuracy_low": wilson_interval(2, 2)[0],
            "accuracy_high": 1,
            "accuracy_per_byte": 0,
            "accuracy_per_byte_low": 0,
            "accuracy_per_byte_high": wilson_interval(0, 2)[1],
        }
    )


def test_equal_choices_are_not_right_by_chance():
    rows = rows_of([2, 2], [0, 1], num_bytes=[1, 1, 1, 1], num_tokens=[1, 1, 1, 1])
    scores = score_continuations(rows, log_likelihoods=np.full(4, -1.0), num_correct=np.zeros(4))
    assert scores["accuracy"] == scores["accuracy_per_byte"] == 0.5


@pytest.mark.parametrize("evaluated", [2, 3, 4])
def test_lines_that_are_not_complete_are_left_out(evaluated):
    first = rows_of([2], [0], num_bytes=[2, 8], num_tokens=[1, 1])
    scores = [
        score_continuations(rows, log_likelihoods=LOG_LIKELIHOODS[:n], num_correct=np.zeros(n))
        for rows, n in ((CHOICES, evaluated), (first, 2))
    ]
    assert scores[0] == scores[1]
    assert scores[0]["lines"] == 1


def test_what_fills_up_the_last_batch_is_left_out():
    more = np.concatenate([LOG_LIKELIHOODS, np.zeros(3)])
    scores = score_continuations(CHOICES, log_likelihoods=more, num_correct=np.zeros(8))
    assert scores == score_continuations(CHOICES, log_likelihoods=LOG_LIKELIHOODS, num_correct=np.zeros(5))


def test_too_few_examples():
    with pytest.raises(DataError, match=r"Evaluated: 1 example, .* line takes 2, .* Raise data\.eval_batches"):
        score_continuations(CHOICES, log_likelihoods=LOG_LIKELIHOODS[:1], num_correct=np.zeros(1))


def test_perplexity_stays_finite():
    rows = rows_of([1], [0], num_bytes=[4], num_tokens=[1])
    scores = score_continuations(rows, log_likelihoods=np.array([-1e5]), num_correct=np.array([0]))
    assert scores["perplexity"] == math.exp(700)
