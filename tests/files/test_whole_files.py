import errno
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from fiddlex.files.whole_files import check_replaceable, remove_leftovers, replacing, unused, write_output, write_whole

OLD, NEW = b"old\n" * 1000, b"new content\n" * 2000

WRITE = f"""
import os, signal, sys
from fiddlex.files import whole_files

path, moment, shared = sys.argv[1], sys.argv[2], sys.argv[3] == "shared"


def die(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)


replace = os.replace
if moment == "before the new name":
    os.replace = die
elif moment == "after the new name":
    os.replace = lambda *arguments: (replace(*arguments), die())
with whole_files.replacing(path, shared=shared, synced=True) as file:
    file.write({NEW!r}[:5000])
    if moment == "while it writes":
        file.flush()
        die()
    file.write({NEW!r}[5000:])
"""


@pytest.mark.parametrize("how", ["alone", "shared"])
@pytest.mark.parametrize(
    ("moment", "content"),
    [("while it writes", OLD), ("before the new name", OLD), ("after the new name", NEW)],
)
def test_a_kill_leaves_the_old_content_or_the_new(
    tmp_path: pathlib.Path, moment: str, content: bytes, how: str
) -> None:
    path = tmp_path / "faults[1].json"
    path.write_bytes(OLD)
    killed = subprocess.run([sys.executable, "-c", WRITE, path, moment, how], timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert path.read_bytes() == content
    left = [each for each in tmp_path.iterdir() if each != path]
    assert len(left) == (content == OLD)
    assert all(each.name.endswith(".tmp") for each in left)

    remove_leftovers(path)
    assert [each for each in tmp_path.iterdir() if each != path] == left  # somebody may write to it
    for each in left:
        os.utime(each, (0, 0))
    remove_leftovers(path) if how == "shared" else write_whole(path, content)
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == content


def fail_in_the_body(path: pathlib.Path, patch: pytest.MonkeyPatch) -> None:
    with replacing(path) as file:
        file.write(NEW)
        raise OSError("the body fails")


def fail_to_sync(path: pathlib.Path, patch: pytest.MonkeyPatch) -> None:
    def full(number: int) -> None:
        raise OSError("the disk is full")

    patch.setattr(os, "fsync", full)
    write_whole(path, NEW)


def fail_to_rename(path: pathlib.Path, patch: pytest.MonkeyPatch) -> None:
    def readonly(source: object, target: object) -> None:
        raise OSError("the disk is read-only")

    patch.setattr(os, "replace", readonly)
    write_whole(path, NEW)


@pytest.mark.parametrize("fail", [fail_in_the_body, fail_to_sync, fail_to_rename])
def test_an_error_leaves_the_old_content_and_nothing_else(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, fail: Callable[..., None]
) -> None:
    path = tmp_path / "best.json"
    path.write_bytes(OLD)
    with pytest.raises(OSError, match=r"^the "), monkeypatch.context() as patch:
        fail(path, patch)
    assert path.read_bytes() == OLD
    assert list(tmp_path.iterdir()) == [path]


def test_the_first_error_is_the_one_that_is_raised(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def readonly(path: pathlib.Path, missing_ok: bool = False) -> None:
        if path.exists():
            raise OSError("the disk is read-only")

    monkeypatch.setattr(pathlib.Path, "unlink", readonly)
    with pytest.raises(OSError, match="the body fails"):
        fail_in_the_body(tmp_path / "best.json", monkeypatch)


def test_a_link_in_the_place_of_the_part_is_not_followed(tmp_path: pathlib.Path) -> None:
    (tmp_path / "mine").write_bytes(OLD)
    (tmp_path / "best.json.tmp").symlink_to(tmp_path / "mine")
    write_whole(tmp_path / "best.json", "µ\n")
    assert (tmp_path / "best.json").read_text(encoding="utf-8") == "µ\n"
    assert {each.name for each in tmp_path.iterdir()} == {"mine", "best.json"}
    assert (tmp_path / "mine").read_bytes() == OLD


def test_two_processes_write_the_same_file_at_the_same_time(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "order.npy"
    with replacing(path, shared=True) as first:
        first.write(OLD[:100])
        with replacing(path, shared=True) as second:
            second.write(NEW)
        assert path.read_bytes() == NEW
        first.write(OLD[100:])
    assert path.read_bytes() == OLD
    assert list(tmp_path.iterdir()) == [path]


def test_folders_and_devices_are_not_replaced(tmp_path: pathlib.Path) -> None:
    (tmp_path / "x").symlink_to("/dev/null")
    (tmp_path / "y").mkdir()
    for path in ("x", "y"):
        with pytest.raises(OSError, match=r"It is a folder or a device, and must be a file: .*/[xy]'"):
            write_whole(tmp_path / path, "text")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x", "y"]
    assert (tmp_path / "x").is_symlink()
    os.mkfifo(tmp_path / "z")
    write_whole(tmp_path / "z", "text")
    assert (tmp_path / "z").read_text() == "text"


def test_an_error_of_a_write_names_the_file(tmp_path: pathlib.Path) -> None:
    """A write to a full disk raises an OSError without a name."""
    for named, expected in ((None, tmp_path / "x"), ("y", "y")):
        with pytest.raises(OSError, match=f"No space left on device: '{expected}'"), replacing(tmp_path / "x"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), named)
    assert list(tmp_path.iterdir()) == []


def test_output_goes_to_devices_and_through_links(tmp_path: pathlib.Path) -> None:
    (tmp_path / "device").symlink_to("/dev/null")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for name in ("device", "link", "other"):
        write_output(tmp_path / name, "text")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["device", "file", "link", "other"]
    assert (tmp_path / "device").is_symlink()
    assert (tmp_path / "file").read_text() == (tmp_path / "other").read_text() == "text"
    for path, reason in (
        (tmp_path, "Is a directory"),
        (tmp_path / "no" / "x", "No such file"),
        ("/dev/full", "No space"),
    ):
        with pytest.raises(OSError, match=f"{reason}.*: '{path}'"):
            write_output(pathlib.Path(path), b"text")


def test_what_cannot_be_replaced_is_known_before(tmp_path: pathlib.Path) -> None:
    check_replaceable(tmp_path / "folder" / "x")
    assert list((tmp_path / "folder").iterdir()) == []
    for path in (tmp_path, pathlib.Path("/proc/x")):
        with pytest.raises(OSError, match=r"\[Errno"):
            check_replaceable(path)


def test_a_name_that_is_taken_is_numbered(tmp_path: pathlib.Path) -> None:
    for _ in range(3):
        unused(tmp_path, "metrics-{}.jsonl").touch()
    assert len(list(tmp_path.iterdir())) == 3
