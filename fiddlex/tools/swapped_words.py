"""A labelled task made from plain text: is a line as it was written, or are two of its words swapped?

The task resembles judging whether a sentence is acceptable (CoLA, Warstadt et al. 2019), but can be made from any text.
The words of a line do not reveal its label; only their order does.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from fiddlex.data.corpus import split_documents
from fiddlex.data.documents import Document
from fiddlex.files.whole_files import write_whole

LABELS = ("intact", "swapped")

Line = tuple[str, str]  # text and label


def write_task(
    folder: Path, documents: Sequence[Document], *, fraction: float, longest: int, seed: int
) -> tuple[list[Line], list[Line]]:
    """Writes `train.jsonl` and `eval.jsonl`, with `text` and `label` on each line, and returns the lines of both.

    All lines of a document are in the same file, and no line occurs twice. The share `fraction` of the documents is for
    `eval.jsonl`; a line has at most `longest` bytes.
    """
    rng, seen = np.random.default_rng(seed), set[str]()
    train, heldout = (
        list(_labelled(side, rng, seen, longest)) for side in split_documents(documents, fraction=fraction)
    )
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in (("train", train), ("eval", heldout)):
        text = "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in lines)
        write_whole(folder / f"{name}.jsonl", text)
    return train, heldout


def _labelled(documents: Sequence[Document], rng: np.random.Generator, seen: set[str], longest: int) -> Iterator[Line]:
    """Every new line of at least three words that is short enough, half of them swapped; adds each line to `seen`."""
    for document in documents:
        for line in document.text.splitlines():
            words = line.split()
            text = " ".join(words)
            places = [i for i in range(len(words) - 1) if words[i] != words[i + 1]]
            if len(words) < 3 or not places or len(text.encode("utf-8", "replace")) > longest or text in seen:
                continue
            seen.add(text)
            swapped = bool(rng.integers(2))
            if swapped:
                i = places[rng.integers(len(places))]
                words[i : i + 2] = words[i + 1], words[i]
            yield " ".join(words), LABELS[swapped]
