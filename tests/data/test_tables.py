import json
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fiddlex.data.bad_lines import BadLineError, choice_index, text_of, value_of
from fiddlex.data.tables import Table, UnfitFileError, read_table
from fiddlex.errors import DataError

# What a cell of a TSV file may hold: no tab, and no line end; quotes and other separators of lines are characters.
CELLS = st.text(st.characters(blacklist_characters="\t\r\n\0", codec="utf-8")).filter(str.strip)
TEXTS = st.text(st.characters(blacklist_characters="\0", codec="utf-8")).filter(str.strip)


def parse(values):
    return text_of(values, "a", named_by="data.text_fields"), text_of(values, "b", named_by="data.label_field")


def read(path: Path, data: bytes | str, *, skip: bool = False) -> Table:
    """Writes `data` and reads it again; the suffix says as what."""
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    fields = {"a": "data.text_fields", "b": "data.label_field"}
    return read_table(f"{path.suffix[1:]}:{path}", parse, fields=fields, skip_bad_lines=skip)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tables")


@given(
    rows=st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=5),
    end=st.sampled_from(["\n", "\r\n"]),
    mark=st.sampled_from(["", "\ufeff"]),
    last=st.booleans(),
)
def test_tsv_round_trip(folder, rows, end, mark, last):
    lines = ["b\tother\ta", *(f"{b}\t\t{a}" for a, b in rows)]
    table = read(folder / "x.tsv", mark + end.join(lines) + end * last)
    assert table.rows == rows
    assert table.lines == list(range(2, len(rows) + 2))
    assert not table.skipped


@given(
    rows=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=5),
    ascii_only=st.booleans(),
    end=st.sampled_from(["\n", "\r\n", "\n\n \n"]),
    mark=st.sampled_from(["", "\ufeff"]),
    last=st.booleans(),
)
def test_jsonl_round_trip(folder, rows, ascii_only, end, mark, last):
    lines = [json.dumps({"b": b, "a": a, "other": None}, ensure_ascii=ascii_only) for a, b in rows]
    table = read(folder / "x.jsonl", mark + end.join(lines) + end * last)
    assert table.rows == rows
    assert table.lines == list(range(1, len(rows) * end.count("\n") + 1, end.count("\n")))


def test_quotes_of_tsv_are_characters(tmp_path):
    table = read(tmp_path / "x.tsv", 'a\tb\n"She said "no".\tx\n\'\t"\n')
    assert table.rows == [('"She said "no".', "x"), ("'", '"')]


def test_blank_lines_are_no_data_but_count(tmp_path):
    table = read(tmp_path / "x.tsv", "a\tb\n\n1\t2\r\n\r\n  \n3\t4\n\n")
    assert (table.rows, table.lines) == ([("1", "2"), ("3", "4")], [3, 6])


def test_files_that_were_joined_have_a_byte_order_mark_within(tmp_path):
    with pytest.raises(
        DataError, match=r"x\.tsv, line 3: it begins with a byte order mark, as where files were joined"
    ):
        read(tmp_path / "x.tsv", "\ufeffa\tb\n1\t2\n\ufeff3\t4\n")


def test_huge_line(tmp_path):
    text = "x" * 5_000_000
    assert read(tmp_path / "x.tsv", f"a\tb\n{text}\ty").rows == [(text, "y")]
    with pytest.raises(DataError) as raised:
        read(tmp_path / "x.tsv", f"a\tb\n{text}")
    assert len(str(raised.value)) < 500 + len(str(tmp_path))


TSV_ERRORS = {
    "1\t2\t3\n": "wrong number of columns: '1\\t2\\t3' has 3 columns, and the header has 2.",
    "1\n": "wrong number of columns: '1' has 1 column, and the header has 2.",
    "\t2\n": "empty text: 'a' is '', and must not be empty.",
    "1\t \n": "empty text: 'b' is ' ', and must not be empty.",
    "1\t2\x003\n": "NUL character: 'b' has a NUL character at position 1.",
    b"1\tcaf\xe9 noir\n": "not UTF-8: byte 0xe9 at offset 5 is not UTF-8 (invalid continuation byte). Convert the file",
}
JSONL_ERRORS = {
    "{'a': 1}": "not JSON: \"{'a': 1}\" is not JSON (Expecting property name enclosed in double quotes at char",
    '{"a": "1", "a": "2"}': 'not JSON: \'{"a": "1", "a": "2"}\' is not JSON (it gives the key \'a\' twice).',
    '{"a": "1",': 'not JSON: \'{"a": "1",\' is not JSON (',
    "[" * 100_000: "not JSON: ",
    '{"a": "x", "b": ' + "9" * 5000 + "}": "not JSON: ",
    '{"a": "\x00", "b": "x"}': "not JSON: ",
    '["a", "b"]': "not an object: ['a', 'b'] is not an object. Each line holds one",
    "7": "not an object: 7 is not an object.",
    "{}": "missing key: there is no key 'a', which data.text_fields names. The object is empty.",
    '{"a": "x", "B": "y"}': "missing key: there is no key 'b', which data.label_field names. Did you mean 'B'?",
    '{"a": "x", "b": 7}': "wrong type: 'b' is 7, and must be a string.",
    '{"a": null, "b": "x"}': "wrong type: 'a' is None, and must be a string.",
    '{"a": "\\t", "b": "x"}': "empty text: 'a' is '\\t', and must not be empty.",
    '{"a": "x\\u0000", "b": "x"}': "NUL character: 'a' has a NUL character at position 1.",
    '{"a": "x\\ud83d", "b": "x"}': "half a character: 'a' has '\\ud83d' at position 1, one half of a surrogate pair",
    b'{"a": "caf\xe9"}': "not UTF-8: byte 0xe9 at offset 10 is not UTF-8 (",
}


@pytest.mark.parametrize(
    ("name", "bad", "message"),
    [("x.tsv", *item) for item in TSV_ERRORS.items()] + [("x.jsonl", *item) for item in JSONL_ERRORS.items()],
    ids=lambda value: str(value)[:20],
)
def test_bad_lines(tmp_path, name, bad, message):
    path, (reason, _, message) = tmp_path / name, message.partition(": ")
    bad = bad if isinstance(bad, bytes) else bad.encode()
    good = b'{"a": "1", "b": "2"}\n' if name == "x.jsonl" else b"1\t2\n"
    start = b"" if name == "x.jsonl" else b"a\tb\n"
    line = 2 + start.count(b"\n")
    with pytest.raises(DataError) as raised:
        read(path, start + good + bad + b"\n" + good)
    error = str(raised.value)
    assert error.startswith(f"{name[2:]}:{path}, line {line}: {message}")
    assert error.endswith(" Mend the line, or set data.skip_bad_lines=True to pass over lines like it.")
    table = read(path, start + good + bad + b"\n" + good, skip=True)
    assert table.skipped == {reason: 1}
    assert table.rows == [("1", "2")] * 2
    assert table.describe() == f"{name[2:]}:{path}: 2 lines, 1 passed over (1 {reason})"
    with pytest.raises(DataError) as raised:
        read(path, start + bad, skip=True)
    error = f"{name[2:]}:{path}: no line is left of 1: 1 {reason}. The first: {name[2:]}:{path}, line {line - 1}: "
    assert str(raised.value).startswith(error + message)
    assert str(raised.value).endswith("change what it names in the config, or name another file.")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("", " is empty. Its first line must name the columns: a, b."),
        ("\ufeff\n\n", " is empty. Its first line must name the columns: a, b."),
        ("a\tb", " has no lines of data. Write the file again, or name another."),
        ("a\tb\r\n\r\n", " has no lines of data. Write the file again, or name another."),
        (
            "a\tbb\n1\t2",
            ", line 1: the header names no column 'b', and data.label_field wants one. Did you mean 'bb'? Set "
            "data.label_field, or mend the header: the names of all columns, with tabs between them.",
        ),
        ("b\tx", ", line 1: the header names no column 'a', and data.text_fields wants one. Known: b, x. Set data.te"),
        ("a\tb\ta", ", line 1: the header names two columns 'a', and data.text_fields wants one. Set data.text_fields"),
        (b"a\tb\xff", ", line 1: byte 0xff at offset 3 is not UTF-8 (invalid start byte). Convert the file"),
        ("a\tb\n1\t2".encode("utf-16"), ", line 1: byte 0xff at offset 0 is not UTF-8"),
    ],
)
@pytest.mark.parametrize("skip", [False, True])
def test_tsv_without_a_table(tmp_path, data, message, skip):
    path = tmp_path / "x.tsv"
    with pytest.raises(DataError) as raised:
        read(path, data, skip=skip)
    assert str(raised.value).startswith(f"tsv:{path}{message}")


def test_jsonl_without_lines(tmp_path):
    for data in ("", "\n\r\n\t\n", "\ufeff"):
        with pytest.raises(DataError, match=r"^jsonl:.*x\.jsonl has no lines of data\. Write the file again"):
            read(tmp_path / "x.jsonl", data)


def test_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for source, what in (("tsv:nowhere", ""), ("jsonl:.", " but a folder")):
        where = tmp_path / "nowhere" if source == "tsv:nowhere" else tmp_path
        message = re.escape(f"{source.partition(':')[0]}:{where}: there is no such file{what}. Check the path.")
        with pytest.raises(DataError, match=f"^{message}$"):
            read_table(source, parse, fields={}, skip_bad_lines=True)


def test_later_checks_know_the_lines(tmp_path):
    def refuse(row):
        if row[0] != "5":
            raise BadLineError("not 5", f"{row[0]} is not 5.")
        return int(row[0])

    path = tmp_path / "x.tsv"
    with pytest.raises(DataError, match=r"x\.tsv, line 2: 1 is not 5\. Mend the line, or set data\.skip_bad_lines"):
        read(path, "a\tb\n1\t2\n5\t6\n").convert(refuse)
    table = read(path, "a\tb\n1\t2\n3\n5\t6\n\n7\t8", skip=True)
    fives = table.convert(refuse)
    assert (fives.rows, fives.lines) == ([5], [4])
    assert fives.skipped == {"wrong number of columns": 1, "not 5": 2}
    assert fives.describe() == f"tsv:{path}: 1 line, 3 passed over (2 not 5, 1 wrong number of columns)"
    with pytest.raises(DataError, match=r"no line is left of 3: 2 not 5, 1 wrong number of columns\. The first: "):
        read(path, "a\tb\n1\t2\n3\n7\t8", skip=True).convert(refuse)


@pytest.mark.parametrize("first", [True, False])
def test_a_key_that_the_first_line_lacks_may_be_missing_from_all(tmp_path, first):
    def parse(values):
        return value_of(values, "verdict", named_by="data.label_field")

    path = tmp_path / "x.jsonl"
    path.write_text('{"verdict": "so"}\n' * (not first) + '{"label": "so"}\n')
    with pytest.raises(DataError, match=r"no key 'verdict', which data\.label_field names") as raised:
        read_table(f"jsonl:{path}", parse, fields={}, skip_bad_lines=False)
    assert ("Where no line of the file has that key, name another key or another file" in str(raised.value)) == first
    assert isinstance(raised.value, UnfitFileError) == first


def test_selected_rows_keep_their_lines(tmp_path):
    table = read(tmp_path / "x.tsv", "a\tb\n1\t2\nbad\n3\t4\n5\t6\n", skip=True).select([2, 0])
    assert (table.rows, table.lines, table.skipped) == ([("5", "6"), ("1", "2")], [5, 2], Counter())


@pytest.mark.parametrize(("label", "index"), [(0, 0), ("0", 0), (" 3 ", 3), (3, 3), ("A", 0), ("D", 3)])
def test_labels_of_choices(label, index):
    assert choice_index(label, 4, name="label") == index


@pytest.mark.parametrize("label", [4, -1, "4", "-1", "E", "a", "", "AB", True, 1.0, None, "9" * 5000, ["A"]])
def test_labels_that_are_no_choice(label):
    with pytest.raises(BadLineError, match=r"^'label' is .*, and must be .* index from 0 to 3 or .* from A to D\.$"):
        choice_index(label, 4, name="label")
