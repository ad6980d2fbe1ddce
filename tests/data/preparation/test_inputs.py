import gzip
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fiddlex.data.preparation import inputs
from fiddlex.data.preparation.inputs import cut, find_files, read_piece
from fiddlex.errors import DataError


def texts_of(*names, key="text"):
    return [text for piece in cut(find_files(list(map(str, names)))) for text in read_piece(piece, key)]


def lines_of(texts, key="text"):
    return "".join(json.dumps({key: text}) + "\n" for text in texts)


@given(texts=st.lists(st.text(max_size=12), max_size=20), size=st.integers(1, 80), ends=st.booleans())
def test_every_line_is_in_one_piece(tmp_path_factory, texts, size, ends):
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    whole = lines_of(texts)
    path.write_text(whole if ends else whole.rstrip("\n"), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "_LEAST_PIECE", size)
        found = [list(read_piece(piece, "text")) for piece in cut(find_files([str(path)]))]
    assert [text for piece in found for text in piece] == texts
    assert sum(piece.num_bytes for piece in cut(find_files([str(path)]))) == path.stat().st_size


def test_lines_that_begin_where_a_piece_does(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text(lines_of("abcdefghij"))
    for size in range(1, 60):
        monkeypatch.setattr(inputs, "_LEAST_PIECE", size)
        assert texts_of(tmp_path / "a.jsonl") == list("abcdefghij")


def test_a_file_that_several_inputs_bring_is_read_once(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfb")
    (tmp_path / "sub" / "link.txt").symlink_to("../b.txt")
    assert sorted(texts_of(tmp_path / "**")) == ["a", "b"]  # the pattern matches the folder and its file
    assert texts_of(tmp_path / "sub", tmp_path / "b.txt", tmp_path, tmp_path / "sub" / "a.txt") == ["a", "b"]
    twice = [str(tmp_path / "b.txt"), f"{tmp_path}/sub/../b.txt"]
    with pytest.raises(
        DataError, match=r"--input names .*/b\.txt twice, and each file is prepared once\. Name it once"
    ):
        find_files(twice)
    (tmp_path / "sub" / "link.txt").unlink()
    (tmp_path / "sub" / "a.txt").write_bytes(b"\0")
    for names in (("sub", "sub/a.txt"), ("sub/a.txt", "sub")):  # the file is named, so that it must be a text
        assert find_files([str(tmp_path / name) for name in names]) == [(str(tmp_path / "sub/a.txt"), False)]


@pytest.mark.parametrize("size", [1, 7, 4 * 2**20])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', "Expecting ',' delimiter"),
        ("[1]", "[1] is not an object"),
        ('{"body": "a"}', "there is no key 'text'. Known: body."),
        ('{"text": 3}', "'text' is 3, and must be a string"),
        ('{"text": ' + "[" * 100_000, "is not JSON (maximum recursion depth exceeded"),
        ('\xef\xbb\xbf{"text": "a"}', "begins with a byte order mark, as where files were joined. Remove it"),
        ('{"text": "\xff"}', "byte 0xff at offset 10 is not UTF-8 (invalid start byte)"),
    ],
)
def test_malformed_lines_are_told_by_file_and_number(tmp_path, monkeypatch, size, line, message):
    monkeypatch.setattr(inputs, "_LEAST_PIECE", size)
    monkeypatch.setattr(inputs, "_MOST_PIECES", 10**9)
    content = lines_of(["one", "two"]).encode() + b"\n" + line.encode("latin-1") + b"\n" + lines_of(["last"]).encode()
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.jsonl, line 4: .*The text is under 'text' \(--json_key\)") as e:
        texts_of(tmp_path / "a.jsonl")
    assert message in str(e.value)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(content))
    with pytest.raises(DataError, match=r"a\.jsonl\.gz, line 4: "):
        texts_of(tmp_path / "a.jsonl.gz")


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_file_may_begin_with_a_byte_order_mark(tmp_path, monkeypatch, name):
    monkeypatch.setattr(inputs, "_LEAST_PIECE", 1)
    for first in ("", "\n"):
        content = b"\xef\xbb\xbf" + (first + lines_of(["one", "two"])).encode()
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        assert texts_of(tmp_path / name) == ["one", "two"]


def test_bytes_of_a_surrogate_are_not_utf_8(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a\xed\xa0\x80b"}\n')
    with pytest.raises(DataError, match=r"line 1: byte 0xed at offset 11 is not UTF-8"):
        texts_of(tmp_path / "a.jsonl")


def test_a_pipe_is_no_input(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    os.mkfifo(tmp_path / "pipe")
    assert texts_of(tmp_path) == ["text"]
    with pytest.raises(DataError, match="is neither a file nor a folder, but a pipe"):
        texts_of(tmp_path / "pipe")


def test_half_of_a_surrogate_pair_is_no_character(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b"}\n{"text": "\\ud83d\\ude00"}\n')
    assert texts_of(tmp_path / "a.jsonl") == ["a\ufffdb", "\U0001f600"]


def test_forms_by_name_and_order(tmp_path):
    (tmp_path / "folder/deep").mkdir(parents=True)
    (tmp_path / "folder/b.txt").write_text("text b")
    (tmp_path / "folder/a.jsonl").write_text(lines_of(["line 1", "line 2"]))
    (tmp_path / "folder/deep/c.md").write_text("text c")
    (tmp_path / "folder/deep/d.txt.gz").write_bytes(gzip.compress(b"text d"))
    (tmp_path / "folder/.hidden").write_text("hidden")
    (tmp_path / "folder/deep/e.bin").write_bytes(b"a\0b")
    (tmp_path / "folder/deep/f.txt").write_bytes(b"\xff")
    expected = ["line 1", "line 2", "text b", "text c", "text d", None, None]
    assert texts_of(tmp_path / "folder") == expected
    assert texts_of(tmp_path / "folder/*.txt", tmp_path / "folder/a.jsonl") == ["text b", "line 1", "line 2"]
    with pytest.raises(DataError, match=r"f\.txt is not UTF-8: byte 0xff at offset 0"):
        texts_of(tmp_path / "folder/deep/f.txt")
    with pytest.raises(DataError, match=r"--input=.*none: there is no such file, or none in it"):
        texts_of(tmp_path / "none")


def test_another_key(tmp_path):
    (tmp_path / "a.json").write_text(lines_of(["x"], key="body"))
    assert texts_of(tmp_path / "a.json", key="body") == ["x"]


def test_truncated_gz_at_any_byte(tmp_path):
    whole = gzip.compress(lines_of(["some text", "more text"]).encode(), mtime=0)
    for size in range(1, len(whole)):
        (tmp_path / "a.jsonl.gz").write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"a\.jsonl\.gz(, line \d+:| is truncated or damaged)"):
            texts_of(tmp_path / "a.jsonl.gz")


def test_zst(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    whole = zstandard.compress(lines_of(["one"]).encode()) + zstandard.compress(lines_of(["two"]).encode())
    (tmp_path / "a.jsonl.zst").write_bytes(whole)
    assert texts_of(tmp_path / "a.jsonl.zst") == ["one", "two"]
    (tmp_path / "a.jsonl.zst").write_bytes(whole[:3] + b"damaged")
    with pytest.raises(DataError, match=r"a\.jsonl\.zst is truncated or damaged"):
        texts_of(tmp_path / "a.jsonl.zst")


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = [f"text {n}" for n in range(50)]
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"n": list(range(50)), "text": texts}), path, row_group_size=7)
    assert texts_of(path) == texts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "_LEAST_PIECE", 1)
        patch.setattr(inputs, "_MOST_PIECES", 10**9)
        assert len(cut(find_files([str(path)]))) == 8
        assert texts_of(path) == texts
    with pytest.raises(DataError, match=r"a\.parquet has no column 'body'; it has n, text\. Set --json_key"):
        texts_of(path, key="body")
    with pytest.raises(DataError, match=r"row 1 of the row groups from 0 on: column 'n' has 0 and not a text"):
        texts_of(path, key="n")
    whole = path.read_bytes()
    for size in range(0, len(whole), 11):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"a\.parquet is no Parquet file, or is damaged"):
            texts_of(path)


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"to read Parquet install the extra parquet"):
        texts_of(tmp_path / "a.parquet")
