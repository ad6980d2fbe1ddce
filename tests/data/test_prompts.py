"""Prompts of a file: each form, and each bad line with its number."""

import pathlib

import pytest

from fiddlex.data.prompts import read_prompts
from fiddlex.errors import ConfigError


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b'\xef\xbb\xbf"one"\r\n\n {"prompt": "two \xe2\x80\xa8", "x": 1}\n""', ["one", "two \u2028", ""]),
        (b'"one"\n\n{"prompt": 3}', r"p\.jsonl, line 3: give a string, or an object with \"prompt\""),
        (b'"one"\n"\\ud800"', "line 2: give a string"),
        (b'"one"\n"\xff"', "line 2: byte 0xff at offset 1 is not UTF-8"),
        (b'"one"\noops', "line 2: 'oops' is not JSON"),
        (b"\n", "p\\.jsonl has no prompts"),
    ],
)
def test_prompts_of_a_file(content: bytes, found: list[str] | str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    if isinstance(found, list):
        assert read_prompts(path) == found
    else:
        with pytest.raises(ConfigError, match=found):
            read_prompts(path)
