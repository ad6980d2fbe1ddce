"""Makes a small labelled task from the source of Python's standard library, for fine-tuning a model.

    fiddlex make_task --output=/tmp/swaps

A line of code is either as it was written (`intact`), or two neighbouring words of it are swapped (`swapped`); the
model must say which. The lines of `train.jsonl` and `eval.jsonl` come from different files. The program prints the
accuracy of a bag of words, naive Bayes over the words of a line, which cannot see their order.
"""

import collections
import math
import pathlib
from collections.abc import Iterator, Sequence

from absl import flags

from fiddlex.data.documents import read_stdlib
from fiddlex.data.statistics import wilson_interval
from fiddlex.terminal.command_line import define_path
from fiddlex.tools.swapped_words import LABELS, Line, write_task

_OUTPUT = define_path("output", None, "folder for train.jsonl and eval.jsonl", required=True)
_LONGEST = flags.DEFINE_integer("longest", 30, "bytes of a line at most", lower_bound=10)
_SEED = flags.DEFINE_integer("seed", 0, "of what is swapped", lower_bound=0)


def main(argv: list[str]) -> None:
    """Writes both files and prints their sizes and the baseline."""
    folder = pathlib.Path(_OUTPUT.value)
    train, heldout = write_task(folder, read_stdlib(), fraction=0.05, longest=_LONGEST.value, seed=_SEED.value)
    right = sum(guess == label for guess, (_, label) in zip(naive_bayes(train, heldout), heldout, strict=True))
    low, high = wilson_interval(right, len(heldout))
    print(
        f"{len(train):,} lines to train on and {len(heldout):,} held out, in {folder}; a bag of words is right for "
        f"{right / len(heldout):.1%} of them (95% interval {low:.1%} to {high:.1%})"
    )


def naive_bayes(train: Sequence[Line], heldout: Sequence[Line]) -> Iterator[str]:
    """Guesses labels from the words of a line, with add-one smoothing."""
    counts = {label: collections.Counter[str]() for label in LABELS}
    for text, label in train:
        counts[label].update(text.split())
    vocabulary = len({word for count in counts.values() for word in count})
    totals = {label: count.total() + vocabulary + 1 for label, count in counts.items()}
    for text, _ in heldout:
        yield max(
            LABELS,
            key=lambda label: sum(math.log((counts[label][word] + 1) / totals[label]) for word in text.split()),
        )
