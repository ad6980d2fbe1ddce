"""The list of mutations fits the code and the tests that there are; `python -m tests.mutations` runs it."""

import ast
import collections
import pathlib

import pytest

from tests.mutations.__main__ import Result, table
from tests.mutations.catalogue import MUTATIONS
from tests.mutations.mutation import Mutation

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_fits_its_file_and_names_tests_that_there_are(mutation: Mutation) -> None:
    assert mutation.file.startswith("fiddlex/")
    text = (ROOT / mutation.file).read_text(encoding="utf-8")
    mutated = mutation.applied(text)
    assert mutated != text
    if mutation.file.endswith(".py"):
        ast.parse(mutated)
    assert mutation.tests
    for test in mutation.tests:
        file, _, name = test.partition("::")
        tests = (ROOT / file).read_text(encoding="utf-8")
        assert not name or f"\ndef {name.partition('[')[0]}(" in tests, test


def test_names_are_unique() -> None:
    counts = collections.Counter(mutation.name for mutation in MUTATIONS)
    assert max(counts.values()) == 1


def test_text_that_is_not_there_once_is_told() -> None:
    mutation = Mutation("m", "fiddlex/x.py", "old", "new", ())
    assert mutation.applied("an old text") == "an new text"
    for text, count in (("a text", 0), ("old old", 2)):
        with pytest.raises(ValueError, match=f"mutation m: its text occurs {count} times in fiddlex/x.py"):
            mutation.applied(text)


def test_the_table_shows_who_caught_what() -> None:
    results = [Result("one", "a.py", "tests/test_a.py::test_b", "", 1.26), Result("two", "b.py", None, "", 20.0)]
    assert table(results).splitlines()[2:] == [
        "| one | a.py | `tests/test_a.py::test_b` | 1.3 |",
        "| two | b.py | **not caught** | 20.0 |",
    ]
