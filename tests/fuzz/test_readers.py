"""Damaged and hostile files give the right value or a FiddlexError, in bounded memory and time.

`third_party/atheris/fuzz.py` does the same for hours, guided by the code that a file reaches.
"""

import importlib.util
import runpy
import shutil
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from hypothesis import given

from fiddlex.errors import FiddlexError
from tests.fuzz.mutants import files
from tests.fuzz.reader import Reader
from tests.fuzz.readers import READERS

MOST_BYTES, MOST_S = 2**26, 20.0  # of memory beside the file's own size, and of time, with other work on the machine
SCRIPT = Path(__file__).parents[2] / "third_party" / "atheris" / "fuzz.py"
MOST_MESSAGE = 3000  # characters
FULL = hypothesis.settings().max_examples >= 200  # the full tier
MOST_CUTS, EXAMPLES = (2000, 300) if FULL else (15, 10)  # of each file, of each reader


@pytest.fixture(scope="module", autouse=True)
def measured() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def refused(reader: Reader, data: bytes) -> bool:
    """Whether the reader refuses a file; any other error, much memory and much time fail."""
    folder = Path(tempfile.mkdtemp())
    tracemalloc.reset_peak()
    before, start_s = tracemalloc.get_traced_memory()[0], time.monotonic()
    try:
        reader.read(folder, data)
    except FiddlexError as error:
        if not 0 < len(str(error)) < MOST_MESSAGE:
            pytest.fail(f"a message of {len(str(error))} characters: {str(error)[:200]}")
        return True
    finally:
        shutil.rmtree(folder)
        assert tracemalloc.get_traced_memory()[1] - before < MOST_BYTES + 100 * len(data)
        assert time.monotonic() - start_s < MOST_S
    return False


@pytest.mark.parametrize("reader", READERS.values(), ids=lambda reader: reader.name)
def test_a_whole_file_is_read(reader: Reader) -> None:
    assert [refused(reader, whole) for whole in reader.seeds()] == [False] * len(reader.seeds())


@pytest.mark.parametrize("reader", READERS.values(), ids=lambda reader: reader.name)
def test_a_damaged_file_is_refused_or_read_as_it_is(reader: Reader) -> None:
    @hypothesis.settings(max_examples=EXAMPLES)
    @given(files(reader.seeds(), is_json=reader.is_json))
    def run(data: bytes) -> None:
        refused(reader, data)

    run()


@pytest.mark.parametrize("reader", READERS.values(), ids=lambda reader: reader.name)
def test_a_file_that_is_cut_short_is_refused(reader: Reader) -> None:
    """At every byte, or in the default tier at some bytes of a long file; unless nothing in it tells its length."""
    for whole in reader.seeds():
        text = whole.rstrip() if reader.is_json else whole
        for length in range(0, len(text), max(1, len(text) // MOST_CUTS)):
            assert refused(reader, whole[:length]) or reader.may_be_cut, length


@pytest.mark.skipif(importlib.util.find_spec("atheris") is not None, reason="needs an environment without atheris")
@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--help"], 0, "usage: fuzz.py"),
        (["--list"], 0, "megatron_idx"),
        (
            ["--reader=megatron_idx"],
            2,
            "fuzz.py: error: atheris is not installed. Install it in an environment of its own",
        ),
    ],
)
def test_the_program_of_atheris_tells_that_atheris_is_missing(
    arguments: list[str],
    status: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    monkeypatch.setattr(sys, "path", list(sys.path))
    ended = 0
    try:
        runpy.run_path(str(SCRIPT))
    except SystemExit as error:
        ended = error.code
    assert ended == status
    told = capsys.readouterr()
    assert message in told.out + told.err
