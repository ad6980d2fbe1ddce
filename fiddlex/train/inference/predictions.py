"""What a model says of each held-out example, as records: a line of a file each, for people to look at."""

import itertools

import numpy as np

from fiddlex.data.continuations import ContinuationExamples
from fiddlex.data.task_examples import ClassificationExamples, MultipleChoiceExamples
from fiddlex.train.record import Record

Answerable = ClassificationExamples | MultipleChoiceExamples


def predicted_labels(examples: Answerable, log_probabilities_EC: np.ndarray) -> list[Record]:
    """Guesses of a task.

    Args:
      examples: those that were held out.
      log_probabilities_EC: floats; of the first examples, or of all.

    Returns:
      Of each example `line`, the number of its line in the file, from 1; `label` and `guess`, the likeliest answer;
      `right`, whether they are the same; `probabilities`. Of classification answers are names of classes, and
      probabilities stand beside them; of multiple choice they are numbers from 0, and probabilities are in their order.
    """
    records = []
    for line, label, logs_C in zip(examples.lines, examples.labels.tolist(), log_probabilities_EC, strict=False):
        guess, probabilities = int(np.argmax(logs_C)), np.exp(logs_C).tolist()
        record = {"line": line, "label": label, "guess": guess, "right": guess == label, "probabilities": probabilities}
        if isinstance(examples, ClassificationExamples):
            names = examples.answers
            named = dict(zip(names, probabilities, strict=True))
            record |= {"label": names[label], "guess": names[guess], "probabilities": named}
        records.append(record)
    return records


def predicted_continuations(examples: ContinuationExamples, scores_E3: np.ndarray) -> list[Record]:
    """Log-likelihoods of continuations.

    Args:
      examples: those that were held out.
      scores_E3: floats, the sums that `Model.scores` tells; of the first examples, or of all. Lines that are not
        complete are left out.

    Returns:
      Of each line `line`, its number in the file, from 1; `log_likelihoods`, of its choices or its continuation in
      nats, summed over tokens; with choices `label` and `guess`, numbers from 0; `right` as `score_continuations` has
      it.
    """
    rows, nats = examples.rows, -scores_E3[:, 0]
    bounds = itertools.pairwise(rows.first[rows.first <= len(nats)].tolist())
    records = []
    for line, label, (start, stop) in zip(examples.lines, rows.labels.tolist(), bounds, strict=False):
        record = {"line": line, "log_likelihoods": nats[start:stop].tolist()}
        if rows.has_choices:
            guess = int(np.argmax(nats[start:stop]))
            record |= {"label": label, "guess": guess, "right": guess == label}
        else:
            record["right"] = round(scores_E3[start, 2]) == int(rows.num_tokens[start])
        records.append(record)
    return records
