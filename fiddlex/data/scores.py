"""Scores of a model from its log-likelihoods of continuations."""

import itertools
import math

import numpy as np

from fiddlex.data.continuations import ContinuationRows
from fiddlex.data.statistics import wilson_interval
from fiddlex.errors import DataError
from fiddlex.terminal.readable import counted


def score_continuations(
    rows: ContinuationRows, *, log_likelihoods: np.ndarray, num_correct: np.ndarray
) -> dict[str, float]:
    """Scores a model by its log-likelihoods of the examples of `ContinuationExamples`.

    Args:
      rows: which line and choice each example belongs to.
      log_likelihoods: float[n], nats of each example's continuation, summed over its tokens. n may be smaller than the
        number of examples (`data.eval_batches`), and then incomplete lines are left out; or larger, and then the
        padding of the last batch is left out.
      num_correct: integers, [n]: number of tokens of the continuation that are the model's most probable ones.

    Returns:
      `lines`, the number of scored lines; `log_likelihood_per_token`, `log_likelihood_per_byte` and `perplexity` (per
      token), all of the right continuations; `accuracy`, the share of lines that are right, with `accuracy_low` and
      `accuracy_high`, its 95% interval. A line without choices is right when all its tokens are the most probable ones,
      a line with choices when the right choice has the highest log-likelihood (the first of equals). Files with choices
      also get `accuracy_per_byte`, with its interval, for which each log-likelihood is divided by its choice's bytes.

    Raises:
      DataError: when no line is complete.
    """
    num_lines = int(np.searchsorted(rows.first, len(log_likelihoods), side="right")) - 1
    if not num_lines:
        raise DataError(
            f"Evaluated: {counted(len(log_likelihoods), 'example')}, and the first line takes {rows.first[1]}, one "
            "for each choice. Raise data.eval_batches."
        )
    first, labels = rows.first[: num_lines + 1], rows.labels[:num_lines]
    answers = first[:-1] + labels  # the examples of the right continuations
    nats, num_bytes = np.asarray(log_likelihoods[: first[-1]], np.float64), rows.num_bytes[: first[-1]]
    total = float(nats[answers].sum())
    per_token = total / float(rows.num_tokens[answers].sum())
    scores = {
        "lines": float(num_lines),
        "log_likelihood_per_token": per_token,
        "log_likelihood_per_byte": total / float(num_bytes[answers].sum()),
        "perplexity": math.exp(min(-per_token, 700.0)),
    }
    if not rows.has_choices:
        return scores | _accuracy("accuracy", num_correct[answers] == rows.num_tokens[answers])
    for name, values in (("accuracy", nats), ("accuracy_per_byte", nats / num_bytes)):
        best = [int(np.argmax(values[start:stop])) for start, stop in itertools.pairwise(first)]
        scores |= _accuracy(name, np.array(best) == labels)
    return scores


def _accuracy(name: str, right: np.ndarray) -> dict[str, float]:
    low, high = wilson_interval(int(right.sum()), len(right))
    return {name: float(right.mean()), f"{name}_low": low, f"{name}_high": high}
