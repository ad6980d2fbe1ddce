import os
import sysconfig
from pathlib import Path, PurePosixPath

import pytest

from fiddlex.data import Document, read_stdlib, read_text
from fiddlex.errors import DataError


def write_files(root: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


@pytest.fixture
def fake_stdlib(tmp_path, monkeypatch):
    paths = {"stdlib": str(tmp_path)}
    monkeypatch.setattr(sysconfig, "get_path", paths.__getitem__)
    return tmp_path


def test_stdlib_of_this_interpreter():
    documents = read_stdlib()
    names = [document.name for document in documents]
    assert {"dataclasses.py", "json/decoder.py", "unittest/mock.py", "encodings/utf_8.py"} <= set(names)
    assert names == sorted(names)
    assert len(set(names)) == len(names)
    assert all(document.text for document in documents)
    parts = {part for name in names for part in PurePosixPath(name).parts}
    assert not parts & {"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data", "__phello__"}
    assert not [part for part in parts if part.startswith(("test_", "_sysconfigdata"))]
    assert "encodings/cp1252.py" not in names
    assert 5e6 < sum(len(document.text) for document in documents) < 20e6


def test_stdlib_rules(fake_stdlib):
    kept = ["a.py", "doctest.py", "encodings/utf_8.py", "latest/x.py", "unittest/case.py"]
    left_out = [
        *("site-packages/numpy/core.py", "dist-packages/apt.py", "ensurepip/_bundled/pip.py"),
        *("test/support.py", "ctypes/test/a.py", "lib2to3/tests/data.py", "idlelib/idle_test/a.py", "test_a.py"),
        *("pydoc_data/topics.py", "__phello__/spam.py", "config-3.11-x86_64-linux-gnu/python-config.py"),
        *("_sysconfigdata__linux_.py", "_sysconfig_vars__linux_.py", "notes.txt", ".hidden.py", "__pycache__/a.pyc"),
    ]
    write_files(fake_stdlib, {name: b"x = 1\n" for name in [*kept, *left_out]})
    write_files(fake_stdlib, {"encodings/cp037.py": b"decoding_table = (\n", "empty.py": b""})
    (fake_stdlib / "sitecustomize.py").symlink_to(fake_stdlib / "a.py")
    assert [document.name for document in read_stdlib()] == kept


def test_stdlib_replaces_what_is_not_utf8(fake_stdlib):
    write_files(fake_stdlib, {"a.py": b"# caf\xe9\n"})
    assert read_stdlib() == [Document("a.py", "# caf�\n")]


def test_stdlib_without_sources(fake_stdlib):
    write_files(fake_stdlib, {"os.pyc": b"\0"})
    with pytest.raises(DataError, match=r"stdlib: there are no \.py files in .*text:PATH"):
        read_stdlib()


def test_folder(tmp_path, caplog):
    write_files(
        tmp_path,
        {
            "b.txt": b"\xef\xbb\xbfbee\r\n",
            "a/z.md": "zé".encode(),
            "a.txt": b"ay",
            "a/y/x": b"ex",
            ".git/config": b"hidden",
            "a/.hidden": b"hidden",
            "image.png": b"\x89PNG\0",
            "late_nul": b"x" * 8192 + b"\0",
            "latin1.txt": b"caf\xe9",
            "empty.txt": b"",
        },
    )
    (tmp_path / "a" / "link.txt").symlink_to("../b.txt")
    documents = {document.name: document.text for document in read_text(tmp_path)}
    assert list(documents) == ["a.txt", "a/y/x", "a/z.md", "b.txt", "late_nul"]
    assert documents["b.txt"] == "bee\r\n"
    assert documents["a/z.md"] == "zé"
    assert len(documents["late_nul"]) == 8193
    told = f"text:{tmp_path}: 2 files passed over (not UTF-8 or binary): image.png, latin1.txt"
    assert caplog.messages == [f"{tmp_path}: a/link.txt is the file b.txt again, and is read once.", told]
    (tmp_path / "a" / "link.txt").unlink()
    (tmp_path / "a" / "hard.txt").hardlink_to(tmp_path / "b.txt")
    (tmp_path / "folder").symlink_to("a")
    (tmp_path / "nowhere.txt").symlink_to("gone.txt")
    caplog.clear()
    assert [document.name for document in read_text(tmp_path)] == ["a.txt", "a/hard.txt", "a/y/x", "a/z.md", "late_nul"]
    assert caplog.messages[:2] == [
        f"{tmp_path}: links to folders, and to what is not there, are not followed: folder, nowhere.txt",
        f"{tmp_path}: b.txt is the file a/hard.txt again, and is read once.",
    ]
    for name in ("a/hard.txt", "folder", "nowhere.txt"):
        (tmp_path / name).unlink()
    caplog.clear()
    write_files(tmp_path, {f"a/{i}.bin": b"\0" for i in range(1000)})
    read_text(tmp_path)
    assert caplog.messages == [
        f"text:{tmp_path}: 1,002 files passed over (not UTF-8 or binary): a/0.bin, a/1.bin, a/10.bin, …"
    ]
    caplog.clear()
    read_text(tmp_path / "a/y")
    assert not caplog.messages


def test_file(tmp_path):
    write_files(tmp_path, {"a.txt": b"\xef\xbb\xbfone\0two\n"})
    assert read_text(tmp_path / "a.txt") == [Document("a.txt", "one\0two\n")]


def test_file_that_is_not_utf8(tmp_path):
    write_files(tmp_path, {"a.txt": b"caf\xe9 noir"})
    with pytest.raises(DataError, match=r"a\.txt is not UTF-8: byte 0xe9 at offset 3 .*iconv"):
        read_text(tmp_path / "a.txt")


def test_nothing_there(tmp_path):
    with pytest.raises(DataError, match="text:/dev/null: it is neither a file nor a folder"):
        read_text(Path("/dev/null"))
    with pytest.raises(DataError, match=r"text:.*nowhere: there is no such file or folder\. Check the path"):
        read_text(tmp_path / "nowhere")


def test_folder_without_text(tmp_path):
    write_files(tmp_path, {"image.png": b"\0", ".hidden": b"text", "empty": b""})
    with pytest.raises(DataError, match=r"the folder has no UTF-8 text file that is not hidden\. Give a text file"):
        read_text(tmp_path)


def test_empty_file(tmp_path):
    write_files(tmp_path, {"a.txt": b""})
    with pytest.raises(DataError, match=r"a\.txt: the file is empty\. Give a text file"):
        read_text(tmp_path / "a.txt")


def test_a_folder_that_may_not_be_read_is_not_passed_over(tmp_path, monkeypatch):
    write_files(tmp_path, {"a.txt": b"text", "locked/b.txt": b"text"})
    scandir = os.scandir

    def locked(path):
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", locked)
    with pytest.raises(PermissionError, match="locked"):
        read_text(tmp_path)
