"""Turns the scores of held-out examples into the numbers of an evaluation record."""

import math
from collections.abc import Sequence

import numpy as np

from fiddlex.data.continuations import ContinuationExamples
from fiddlex.data.dataset import Dataset
from fiddlex.data.scores import score_continuations
from fiddlex.data.statistics import wilson_interval
from fiddlex.errors import DataError
from fiddlex.train.record import Record


def summarise(scores_EP3: np.ndarray, parts: Sequence[str], task: str, dataset: Dataset) -> Record:
    """The numbers of an evaluation; all losses are in nats.

    `scores_EP3` are float64, the sums that `Model.scores` returns for every example and each of `Model.parts`. Raises
    DataError when nothing was scored for a part of the loss.

    Returns:
      `eval_loss`, the sum of the means of all parts; where there are two, also `eval_masked_loss` and `eval_pair_loss`.
      For tokens: `eval_tokens`, the number of tokens scored; `eval_perplexity`; and `eval_accuracy` (lm) or
      `eval_masked_accuracy`, the share of tokens that the model ranks first. For lm where the text is known: also
      `eval_loss_per_byte` and `eval_perplexity_per_byte`.

      For labels: `eval_examples`, the number of examples scored; and `eval_accuracy` (for sentence pairs
      `eval_pair_accuracy`) with the ends of its 95% interval, `…_low` and `…_high`. For continuations: the numbers that
      `score_continuations` returns, with `eval_` before their names, except that `eval_loss`, `eval_loss_per_byte` and
      `eval_perplexity_per_byte` take the place of the log-likelihoods.
    """
    if isinstance(dataset.heldout, ContinuationExamples):
        return _continuations(scores_EP3[:, 0], dataset.heldout)
    totals = {part: scores_EP3[:, i].sum(axis=0) for i, part in enumerate(parts)}
    if empty := [part for part, (_, weight, _) in totals.items() if not weight]:
        raise DataError(
            f"Of {len(scores_EP3):,} held-out examples no {' and no '.join(empty)} can be scored: all are special or "
            "unknown to the tokenizer. Is data.tokenizer the one for this text?"
        )
    means = {part: float(loss / weight) for part, (loss, weight, _) in totals.items()}
    record: Record = {"eval_loss": math.fsum(means.values())}
    if len(parts) > 1:
        record |= {"eval_masked_loss": means["tokens"], "eval_pair_loss": means["labels"]}
    if "tokens" in totals:
        _, weight, right = totals["tokens"]
        record |= {"eval_tokens": round(weight), "eval_perplexity": _perplexity(means["tokens"])}
        record["eval_accuracy" if task == "lm" else "eval_masked_accuracy"] = float(right / weight)
        if task == "lm" and (bytes_per_token := dataset.bytes_per_token(round(weight))):
            per_byte = means["tokens"] / bytes_per_token
            record |= {"eval_loss_per_byte": per_byte, "eval_perplexity_per_byte": _perplexity(per_byte)}
    if "labels" in totals:
        _, weight, right = totals["labels"]
        name = "eval_pair_accuracy" if "tokens" in totals else "eval_accuracy"
        low, high = wilson_interval(round(right), round(weight))
        record |= {
            "eval_examples": round(weight),
            name: float(right / weight),
            f"{name}_low": low,
            f"{name}_high": high,
        }
    return record


def merit(record: Record, task: str) -> tuple[float, ...]:
    """Sort key, the best evaluation largest: for labels the accuracy, then the loss; otherwise the loss alone."""
    loss = -record["eval_loss"]
    return (record["eval_accuracy"], loss) if task in ("classification", "multiple_choice") else (loss,)


def _continuations(scores_E3: np.ndarray, examples: ContinuationExamples) -> Record:
    scores = score_continuations(
        examples.rows, log_likelihoods=-scores_E3[:, 0], num_correct=np.rint(scores_E3[:, 2]).astype(np.int64)
    )
    per_token, per_byte = scores.pop("log_likelihood_per_token"), scores.pop("log_likelihood_per_byte")
    record = {
        "eval_loss": -per_token,
        "eval_loss_per_byte": -per_byte,
        "eval_perplexity_per_byte": _perplexity(-per_byte),
    }
    return record | {f"eval_{name}": round(value) if name == "lines" else value for name, value in scores.items()}


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))
