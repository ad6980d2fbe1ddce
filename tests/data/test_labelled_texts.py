import json
import re
import shlex
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fiddlex.config import DataConfig
from fiddlex.data import Table, TaskRow, read_classification, read_multiple_choice, split_table
from fiddlex.errors import ConfigError, DataError

NLI = DataConfig(labels="entailment, neutral,contradiction", label_field="gold_label")
RACE = DataConfig(text_fields="article, question", choices_fields="options", num_choices=3, label_field="answer")
SWAG = DataConfig(text_fields="sent1,sent2", choices_fields="ending0,ending1", num_choices=2)


def write(path: Path, lines: list) -> str:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return f"{path.suffix[1:]}:{path}"


def refused(read, source: str, config: DataConfig) -> str:
    with pytest.raises(DataError) as raised:
        read(source, config)
    return str(raised.value)


def as_table(rows: list[TaskRow]) -> Table[TaskRow]:
    return Table("tsv:/x.tsv", list(range(len(rows))), rows, skip_bad_lines=False, skipped=Counter({"bad": 3}))


def pair(first: str, second: str = "") -> TaskRow:
    return TaskRow((first, second) if second else (first,), (), 0)


def test_classification_of_tsv(tmp_path):
    lines = ["index\tsentence1\tgenre\tsentence2\tgold_label", '0\t"A\tx\tB\tneutral', "1\tC\ty\tD\t contradiction "]
    table = read_classification(write(tmp_path / "x.tsv", lines), NLI)
    assert table.rows == [TaskRow(('"A', "B"), (), 1), TaskRow(("C", "D"), (), 2)]


def test_classification_of_jsonl(tmp_path):
    lines = [{"text": "a", "label": 1}, {"text": "b", "label": "0"}, {"text": "c", "label": True}]
    config = DataConfig(text_fields="text", labels="0,1,true")
    table = read_classification(write(tmp_path / "x.jsonl", lines), config)
    assert table.rows == [TaskRow(("a",), (), 1), TaskRow(("b",), (), 0), TaskRow(("c",), (), 2)]


def test_label_outside_the_classes(tmp_path):
    lines = ["sentence1\tsentence2\tgold_label", "a\tb\tneutral", "c\td\t-", "e\tf\tyes", "g\th\tyes"]
    source = write(tmp_path / "x.tsv", lines)
    assert refused(read_classification, source, NLI) == (
        f"{source}, line 3: 'gold_label' is '-', which is not among data.labels=entailment, neutral,contradiction. The "
        "file's labels are 'yes' (2), 'neutral' (1), '-' (1). To have them all: --config.data.labels=-,neutral,yes. "
        "Mend the line, or set data.skip_bad_lines=True to pass over lines like it."
    )
    table = read_classification(source, DataConfig(**{**vars(NLI), "skip_bad_lines": True}))
    assert table.rows == [TaskRow(("a", "b"), (), 1)]
    assert table.skipped == {"label outside data.labels": 3}


def test_labels_to_be_copied_are_quoted(tmp_path):
    lines = [{"text": "x", "label": label} for label in ("not so", "it's so")]
    message = refused(
        read_classification, write(tmp_path / "x.jsonl", lines), DataConfig(text_fields="text", labels="a,b")
    )
    flag = re.search(r"To have them all: (.*)\. Mend", message)
    assert flag is not None
    assert shlex.split(flag[1]) == ["--config.data.labels=it's so,not so"]


def test_label_of_the_wrong_column(tmp_path):
    source = write(tmp_path / "x.jsonl", [{"text": str(i), "label": f"text {i}"} for i in range(1000)])
    message = refused(read_classification, source, DataConfig(text_fields="text", labels="a,b"))
    assert "line 1: 'label' is 'text 0', which is not among data.labels=a,b. The file has 1,000 labels, su" in message
    assert "Is data.label_field right?" in message
    source = write(tmp_path / "x.jsonl", [{"text": "a", "label": 1.5}])
    assert "line 1: 'label' is 1.5, and must be the name of a class, a string. Mend" in refused(
        read_classification, source, DataConfig(text_fields="text", labels="a,b")
    )
    source = write(tmp_path / "x.jsonl", [{"text": "a"}])
    assert "line 1: there is no key 'label', which data.label_field names. Known: text. Where no line" in refused(
        read_classification, source, DataConfig(text_fields="text", labels="a,b")
    )


def test_multiple_choice_of_a_list(tmp_path):
    lines = [
        {"article": "Long.", "question": "Why?", "options": ["x", "y", "z"], "answer": "B", "id": 7},
        {"article": "Long.", "question": "Who?", "options": ["p", "q", "q"], "answer": 2},
    ]
    table = read_multiple_choice(write(tmp_path / "x.jsonl", lines), RACE)
    assert table.rows == [
        TaskRow(("Long.", "Why?"), ("x", "y", "z"), 1),
        TaskRow(("Long.", "Who?"), ("p", "q", "q"), 2),
    ]


@pytest.mark.parametrize("kind", ["tsv", "jsonl"])
def test_multiple_choice_of_columns(tmp_path, kind):
    columns = ["ending1", "ending0", "sent1", "sent2", "label"]
    values = ["one", "zero", "It rains.", "They", "1"]
    lines = ["\t".join(columns), "\t".join(values)] if kind == "tsv" else [dict(zip(columns, values, strict=True))]
    table = read_multiple_choice(write(tmp_path / f"x.{kind}", lines), SWAG)
    assert table.rows == [TaskRow(("It rains.", "They"), ("zero", "one"), 1)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"options": ["x", "y"]},
            "'options' has 2 choices, and data.num_choices=3; all lines have as many. Where all have 2, set "
            "data.num_choices=2. Mend",
        ),
        ({"options": "x,y,z"}, "'options' is 'x,y,z', and must be a list of strings. Mend"),
        ({"options": ["x", "y", 3]}, "'options[2]' is 3, and must be a string. Mend"),
        ({"options": ["x", " ", "z"]}, "'options[1]' is ' ', and must not be empty. Mend"),
        (
            {"answer": "D"},
            "'answer' is 'D', and must be the right choice's index from 0 to 2 or its letter from A to C.",
        ),
        ({"question": ""}, "'question' is '', and must not be empty. Mend"),
    ],
)
def test_bad_lines_of_multiple_choice(tmp_path, change, message):
    line = {"article": "Long.", "question": "Why?", "options": ["x", "y", "z"], "answer": "B"}
    source = write(tmp_path / "x.jsonl", [line, line | change])
    assert refused(read_multiple_choice, source, RACE).startswith(f"{source}, line 2: {message}")
    for name in line:
        source = write(tmp_path / "x.jsonl", [{key: value for key, value in line.items() if key != name}])
        assert f"line 1: there is no key '{name}', which data." in refused(read_multiple_choice, source, RACE)


@pytest.mark.parametrize("fields", ["a,b,c", "", "a,", "a,a"])
def test_text_fields(fields):
    message = re.escape(f"data.text_fields={fields!r} must name one column or key, or two with a comma between")
    for read in (read_classification, read_multiple_choice):
        with pytest.raises(ConfigError, match=message):
            read("tsv:nowhere", DataConfig(text_fields=fields))


@pytest.mark.parametrize(("texts", "choices"), [("a,label", "b,c"), ("a", "b,label")])
def test_the_label_is_not_what_the_model_reads(texts, choices):
    config = DataConfig(text_fields=texts, choices_fields=choices, num_choices=2)
    reads = [read_multiple_choice] + [read_classification] * ("label" in texts)
    for read in reads:
        with pytest.raises(
            ConfigError, match=r"^data\.label_field='label' is also a field of what the model reads \(a,"
        ):
            read("tsv:nowhere", config)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (
            "tsv",
            "a",
            "names 1; with data.num_choices=3 it must name 3 columns, each once and with commas between them. Set "
            "data.choices_fields, or data.num_choices to the number of choices that every line has.",
        ),
        ("jsonl", "a,b", "names 2; with data.num_choices=3 it must name 3 keys, .* or one key that holds a list."),
        ("jsonl", "a,b,a", "names 3; with data.num_choices=3 it must name 3 keys, each once"),
        ("jsonl", "", "names 1; "),
    ],
)
def test_choices_fields(kind, fields, message):
    with pytest.raises(ConfigError, match=f"^data.choices_fields='{fields}' {message}"):
        read_multiple_choice(f"{kind}:nowhere", DataConfig(num_choices=3, choices_fields=fields))


@given(
    rows=st.lists(st.builds(pair, st.text("ab", min_size=1, max_size=3), st.text("xy", max_size=2)), min_size=2),
    fraction=st.floats(0.001, 0.999),
)
def test_split_parts_the_texts(rows, fraction):
    table = as_table(rows)
    if len({row.texts for row in rows}) == 1:
        with pytest.raises(DataError, match=r"lines have the same texts, of which data\.eval_fraction=.* Set data\.ev"):
            split_table(table, fraction=fraction)
        return
    train, heldout = split_table(table, fraction=fraction)
    assert train.rows
    assert heldout.rows
    assert sorted([*train.lines, *heldout.lines]) == list(table.lines)
    assert all([rows[i] for i in side.lines] == side.rows and not side.skipped for side in (train, heldout))
    assert not {row.texts for row in train.rows} & {row.texts for row in heldout.rows}
    if len({row.texts[0] for row in rows}) > 1:
        assert not {row.texts[0] for row in train.rows} & {row.texts[0] for row in heldout.rows}


@given(names=st.sets(st.text("abc", min_size=1, max_size=6)), more=st.sets(st.text("abc", min_size=1, max_size=6)))
def test_split_of_a_text_does_not_depend_on_the_others(names, more):
    def heldout(texts):
        return {row.texts[0] for row in split_table(as_table([pair(text) for text in texts]), fraction=0.3)[1].rows}

    fixed = {f"text {i}" for i in range(20)}  # some on either side: no side needs one
    assert heldout(fixed | names) == heldout(fixed | names | more) & (fixed | names)


def test_split_takes_about_the_share():
    table = as_table([pair(f"text {i}") for i in range(2000)])
    assert 140 < len(split_table(table, fraction=0.1)[1]) < 260
    train, heldout = split_table(table, fraction=0.0)
    assert (train.rows, heldout.rows) == (table.rows, [])


def test_a_share_that_is_far_from_what_was_asked_is_told(caplog):
    questions = [TaskRow((f"passage {i % 4}",), (str(i), "other"), 0) for i in range(200)]
    heldout = split_table(as_table(questions), fraction=0.05)[1]
    assert caplog.messages == [
        f"tsv:/x.tsv: {len(heldout)} of 200 lines are held out ({len(heldout) / 2:.1f}%) with data.eval_fraction=0.05: "
        "lines that share their first text are not parted, and there are 4 to choose from. For a split of your own set "
        "data.eval_source."
    ]
    caplog.clear()
    split_table(as_table([pair(f"text {i}") for i in range(2000)]), fraction=0.05)
    split_table(as_table(questions), fraction=0.0)
    assert not caplog.messages


def test_split_by_choices_alone():
    rows = [TaskRow(("Which?",), (f"choice {i}", "other"), 0) for i in range(2)]
    assert [len(side) for side in split_table(as_table(rows), fraction=0.01)] == [1, 1]
