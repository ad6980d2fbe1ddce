import json
import pathlib
from collections import Counter

from fiddlex.data.documents import Document
from fiddlex.tools.swapped_words import write_task

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def documents(number: int) -> list[Document]:
    """Lines that count through the words, each of its own document and order."""

    def line(i: int, j: int) -> str:
        return " ".join(f"{WORDS[(j + k) % 10]}{i}" for k in range(4))

    texts = ("\n".join(line(i, j) for j in range(10)) for i in range(number))
    return [Document(f"{i}.txt", text + "\ntoo short\n\nsame same same\n") for i, text in enumerate(texts)]


def test_half_of_the_lines_have_two_neighbours_swapped(tmp_path: pathlib.Path) -> None:
    originals = {line for document in documents(60) for line in document.text.splitlines() if len(line.split()) == 4}
    train, heldout = write_task(tmp_path / "task", documents(60), fraction=0.2, longest=40, seed=0)
    assert len(train) + len(heldout) == len(originals) == 600
    for text, label in [*train, *heldout]:
        assert (label == "intact") == (text in originals)
        words = text.split()
        mended = {" ".join([*words[:i], words[i + 1], words[i], *words[i + 2 :]]) for i in range(3)}
        assert label == "intact" or mended & originals
    counts = Counter(label for _, label in [*train, *heldout])
    assert abs(counts["intact"] - 300) < 5 * (600 / 4) ** 0.5
    of_train, of_heldout = (
        {text.split()[0].lstrip("efghinorstuvwxz") for text, _ in side} for side in (train, heldout)
    )
    assert not of_train & of_heldout  # no document is on both sides
    for name, lines in (("train", train), ("eval", heldout)):
        written = [json.loads(line) for line in (tmp_path / f"task/{name}.jsonl").read_text().splitlines()]
        assert [(line["text"], line["label"]) for line in written] == lines


def test_lines_that_are_long_or_there_already_are_left_out(tmp_path: pathlib.Path) -> None:
    twice = [Document("a", "a b c\na  b c\nlong words stand here\n"), Document("b", "a b c\nd e f\n")]
    train, heldout = write_task(tmp_path, twice, fraction=0.5, longest=10, seed=0)
    assert sorted(sorted(text.split()) for text, _ in [*train, *heldout]) == [["a", "b", "c"], ["d", "e", "f"]]
