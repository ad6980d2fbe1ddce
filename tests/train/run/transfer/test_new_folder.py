"""A folder that appears whole or not at all, whatever is in its way."""

import os
import pathlib
import subprocess
import sys

import pytest

from fiddlex.errors import CheckpointError
from fiddlex.train.run.transfer.new_folder import LOCK, new_folder
from tests.programs import ROOT


def names(folder: pathlib.Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("empty", [False, True])
def test_it_appears_whole(empty: bool, tmp_path: pathlib.Path) -> None:
    """Where nothing is, or an empty directory."""
    if empty:
        (tmp_path / "new").mkdir()
    with new_folder(tmp_path / "new") as made:
        (made / "a").write_text("1")
        assert not (tmp_path / "new" / "a").exists()
    assert names(tmp_path) == {"new"}
    assert names(tmp_path / "new") == {"a"}


def test_an_error_leaves_nothing(tmp_path: pathlib.Path) -> None:
    def half() -> None:
        with new_folder(tmp_path / "new") as made:
            (made / "a").write_text("1")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        half()
    assert not names(tmp_path)


def test_it_appears_once_its_files_are_on_disk(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(number: int) -> None:
        raise OSError("the disk is full")

    def whole() -> None:
        with new_folder(tmp_path / "new") as made:
            (made / "below").mkdir()
            (made / "below" / "a").write_text("1")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="the disk is full"):
        whole()
    assert not names(tmp_path)


def test_folders_of_the_user_are_left_alone(tmp_path: pathlib.Path) -> None:
    for name in ("new.tmp", ".new.fiddlex-part", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").symlink_to(tmp_path / "empty")
    (tmp_path / "file").touch()
    for name in ("new", "there", "link", "other", "file"):
        message = "is in the way" if name == "new" else "is there already, and is no empty directory"
        with pytest.raises(CheckpointError, match=message), new_folder(tmp_path / name):
            pass
    assert names(tmp_path) == {"new.tmp", ".new.fiddlex-part", "there", "link", "other", "empty", "file"}
    assert all((tmp_path / name / "notes").exists() for name in ("new.tmp", ".new.fiddlex-part", "there"))


def test_a_killed_process_is_cleared_up_after_and_a_running_one_is_not(tmp_path: pathlib.Path) -> None:
    code = f"""
import pathlib
from fiddlex.train.run.transfer.new_folder import new_folder
with new_folder(pathlib.Path({str(tmp_path / "new")!r})) as made:
    (made / "half").write_text("")
    print("ready", flush=True)
    input()
"""
    line = [sys.executable, "-c", code]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        with pytest.raises(CheckpointError, match="Another process is making"), new_folder(tmp_path / "new"):
            pass
        process.kill()
    assert (tmp_path / ".new.fiddlex-part" / LOCK).exists()
    with new_folder(tmp_path / "new") as made:
        assert not names(made)
    assert names(tmp_path) == {"new"}
