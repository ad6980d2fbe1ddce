"""A model's predictions for held-out examples, as records for people to read: one line of a file each."""

import itertools

import numpy as np

from fiddlex.data.continuations import ContinuationExamples
from fiddlex.data.task_examples import ClassificationExamples, MultipleChoiceExamples
from fiddlex.train.record import Record

Answerable = ClassificationExamples | MultipleChoiceExamples


def predicted_labels(examples: Answerable, log_probabilities_EC: np.ndarray) -> list[Record]:
    """A model's guesses for held-out examples: all, or the first ones if `log_probabilities_EC` has only these.

    A record has `line`, the number of the example's line in the file, counted from 1; `label`, the right answer;
    `guess`, the likeliest answer; `right`, whether they are equal; and `probabilities`. In classification, answers are
    class names and `probabilities` maps each name to its probability. In multiple choice, answers are numbers from 0
    and `probabilities` is a list in their order.
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
    """A model's log-likelihoods of held-out continuations, from the sums that `Model.scores` returns.

    `scores_E3` are those of all examples or of the first ones; lines whose examples are not all scored are left out. A
    record has `line`, its number in the file, counted from 1; `log_likelihoods` in nats, summed over tokens, one for
    each choice or one for the continuation; with choices, `label` and `guess`, numbers from 0; and `right`, as
    `score_continuations` defines it.
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
