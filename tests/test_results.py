"""Results of a study that was killed and goes on."""

import json
import pathlib

import pytest

from experiments.benchmarks.compile_cases import CompileCase, measure
from experiments.results import append_result, owned, read_results
from fiddlex.errors import ConfigError, FiddlexError
from tests.programs import call

LINES = "".join(json.dumps({"case": str(number), "bytes": number}) + "\n" for number in range(3))


@pytest.mark.parametrize("cut", range(LINES.index("\n"), len(LINES) + 1))
def test_a_line_that_was_cut_short_gives_way_to_the_next(cut: int, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(LINES[:cut])
    kept = read_results(path, ["case"])
    assert path.read_text() == LINES[:cut]
    assert [result["bytes"] for result in kept] == list(range(len(kept)))
    assert len(kept) >= LINES[:cut].count("\n")
    append_result(path, {"case": "more", "bytes": 9})
    assert [result["bytes"] for result in read_results(path, ["case", "bytes"])] == [*range(len(kept)), 9]


@pytest.mark.parametrize("line", ["{", "[]", "null", '{"bytes": 1}', "[" * 5000, "9" * 5000])
def test_another_line_that_is_no_result_is_told(line: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(f"{LINES}{line}\n")
    with pytest.raises(ConfigError, match=r"results\.jsonl, line 4: not a result.* Remove"):
        read_results(path, ["case"])


@pytest.mark.parametrize("content", [b'{"steps": 5}', b'{"steps":', b"def main():", b"\xff\xfe"])
def test_a_file_of_something_else_is_refused(content: bytes, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json.*not (a result|results)"):
        read_results(path, ["case"])
    assert path.read_bytes() == content


def test_the_first_line_makes_the_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "new" / "results.jsonl"
    append_result(path, {"case": "0"})
    assert read_results(path, ["case"]) == [{"case": "0"}]


def test_there_need_be_no_file(tmp_path: pathlib.Path) -> None:
    assert read_results(tmp_path / "none.jsonl", ["case"]) == []


def test_one_run_at_a_time_has_the_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "new" / "results.jsonl"
    with (
        owned(path),
        pytest.raises(ConfigError, match=r"results\.jsonl: another run adds its results there\."),
        owned(path),
    ):
        pass
    with owned(path):
        append_result(path, {"case": "0"})
    assert read_results(path, ["case"]) == [{"case": "0"}]


@pytest.mark.parametrize("name", [".", "file/results.jsonl"])
def test_a_file_that_cannot_be_written_is_told(name: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match=r"cannot be written: .*\. Name another file for the results\."),
        owned(tmp_path / name),
    ):
        pass


def test_a_study_of_compiled_models_tells_its_mistakes(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FiddlexError, match=r"^gpt_tiny\.py does not compile for tpu:v5e: .* status 2"):
        measure(CompileCase("gpt_tiny.py", "tpu:v5e", {}), limit_s=100)
    (tmp_path / "file").touch()
    done = call(
        "experiments.benchmarks.hidden_exchange", "--only=3.6b", f"--results={tmp_path}/file/results.jsonl", status=2
    )
    assert "file/results.jsonl cannot be written: " in done.stderr
    assert "…" not in done.stderr
