"""Files that could not be written are refused before the work; folders that are not there are made."""

import os
import pathlib

import pytest

from fiddlex.errors import ConfigError
from fiddlex.terminal.output_format import check_output


def test_what_can_be_written_is_left_as_it_is(tmp_path: pathlib.Path) -> None:
    there = tmp_path / "there.svg"
    there.write_text("a")
    (tmp_path / "link.svg").symlink_to(there)
    for path in (there, tmp_path / "link.svg", tmp_path / "new" / "deep" / "a.svg", pathlib.Path(os.devnull)):
        check_output("--output", path)
    assert there.read_text() == "a"
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["deep", "link.svg", "new", "there.svg"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("folder", "Is a directory"),
        ("file/a.svg", "File exists"),
        ("broken", "it is a link to nothing"),
        ("to_folder", "Is a directory"),
    ],
)
def test_what_cannot_be_written_is_refused(name: str, reason: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "broken").symlink_to("nothing")
    (tmp_path / "to_folder").symlink_to("folder")
    with pytest.raises(ConfigError) as raised:
        check_output("--plot", tmp_path / name)
    rule = f"--plot={tmp_path / name} cannot be written: {reason}. Name a file in a folder that you may write to."
    assert str(raised.value) == rule
