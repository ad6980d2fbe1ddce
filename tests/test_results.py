"""Results of a study that was killed and goes on."""

import json
import pathlib

import pytest

from experiments.results import read_results
from fiddlex.errors import ConfigError

LINES = "".join(json.dumps({"case": str(number), "bytes": number}) + "\n" for number in range(3))


@pytest.mark.parametrize("cut", range(len(LINES) + 1))
def test_a_line_that_was_cut_short_is_taken_off(cut: int, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(LINES[:cut])
    kept = read_results(path, ["case"])
    assert [result["bytes"] for result in kept] == list(range(len(kept)))
    assert len(kept) >= LINES[:cut].count("\n")
    with path.open("a") as file:
        file.write('{"case": "more", "bytes": 9}\n')
    assert [result["bytes"] for result in read_results(path, ["case", "bytes"])] == [*range(len(kept)), 9]


@pytest.mark.parametrize("line", ["{", "[]", "null", '{"bytes": 1}', "[" * 5000, "9" * 5000])
def test_another_line_that_is_no_result_is_told(line: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(f"{LINES}{line}\n")
    with pytest.raises(ConfigError, match=r"results\.jsonl, line 4: not a result .* Remove the line\."):
        read_results(path, ["case"])
    assert path.read_text() == f"{LINES}{line}\n"


def test_there_need_be_no_file(tmp_path: pathlib.Path) -> None:
    assert read_results(tmp_path / "none.jsonl", ["case"]) == []
