import types
from collections import Counter

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from fiddlex.data import (
    ByteTokenizer,
    ClassificationExamples,
    JsonTokenizer,
    MultipleChoiceExamples,
    Table,
    TaskRow,
    class_shares,
)
from fiddlex.errors import ConfigError, DataError

PAD, CLS, SEP = 0, 0xFE, 0xFD
SPECIAL = types.SimpleNamespace(pad=PAD, cls=CLS, sep=SEP)
WORDS = st.text("abcé", min_size=1, max_size=12)


def table_of(rows: list[TaskRow], *, skip: bool = False) -> Table[TaskRow]:
    lines = [10 + i for i in range(len(rows))]
    return Table("tsv:/x.tsv", lines, rows, skip_bad_lines=skip, skipped=Counter({"not JSON": 2} if skip else {}))


def classification(rows: list[TaskRow], *, seq_len=12, truncate=False, skip=False, classes=("no", "yes")):
    return ClassificationExamples(
        table_of(rows, skip=skip),
        classes=classes,
        tokenizer=ByteTokenizer(),
        special=SPECIAL,
        seq_len=seq_len,
        truncate=truncate,
    )


def choices(rows: list[TaskRow], *, seq_len=16, truncate=False, skip=False):
    return MultipleChoiceExamples(
        table_of(rows, skip=skip), tokenizer=ByteTokenizer(), special=SPECIAL, seq_len=seq_len, truncate=truncate
    )


def shapes(example) -> dict:
    return {name: (values.shape, values.dtype.name) for name, values in example.items()}


def read_back(tokens: np.ndarray, segments: np.ndarray, token_types: np.ndarray) -> list[bytes]:
    """The texts of an example, after checking its form."""
    length = int(segments.sum())
    assert segments.tolist() == [1] * length + [0] * (len(segments) - length)
    assert tokens[0] == CLS
    assert tokens[length - 1] == SEP
    assert (tokens[length:] == PAD).all()
    ends = np.flatnonzero(tokens == SEP)
    assert token_types.tolist() == [0] * (ends[0] + 1) + [1] * (length - ends[0] - 1) + [0] * (len(tokens) - length)
    starts = [1, *(ends[:-1] + 1)]
    return [bytes(tokens[start:end].astype(np.uint8)) for start, end in zip(starts, ends, strict=True)]


def cut_as_bert(first: bytes, second: bytes, room: int) -> list[bytes]:
    """`_truncate_seq_pair` of BERT's run_classifier.py."""
    while len(first) + len(second) > room:
        if len(first) > len(second):
            first = first[:-1]
        else:
            second = second[:-1]
    return [first, second]


def test_a_pair():
    source = classification([TaskRow(("ab", "c"), (), 1)], seq_len=8)
    example = source.example(0, epoch=3)
    assert example["tokens"].tolist() == [CLS, 97, 98, SEP, 99, SEP, PAD, PAD]
    assert example["segments"].tolist() == [1, 1, 1, 1, 1, 1, 0, 0]
    assert example["token_types"].tolist() == [0, 0, 0, 0, 1, 1, 0, 0]
    assert (example["labels"], example["label_weights"]) == (1, 1)
    assert shapes(example) == {
        **dict.fromkeys(["tokens", "segments", "token_types"], ((8,), "int32")),
        "labels": ((), "int32"),
        "label_weights": ((), "float32"),
    }


def test_one_text():
    example = classification([TaskRow(("x",), (), 0), TaskRow(("abc",), (), 1)], seq_len=5).example(1, epoch=0)
    assert example["tokens"].tolist() == [CLS, 97, 98, 99, SEP]
    assert example["segments"].tolist() == [1] * 5
    assert example["token_types"].tolist() == [0] * 5


def test_a_task_that_a_tokenizer_was_not_made_for_is_told(numbered, caplog):
    def read(*texts):
        rows = [TaskRow((text,), (), 0) for text in texts]
        special = numbered.vocabulary.special
        ClassificationExamples(
            table_of(rows), classes=("a", "b"), tokenizer=numbered, special=special, seq_len=8, truncate=False
        )
        return caplog.messages

    assert not read("w6 w8", "w9")
    (message,) = read("w6 w8", "other")
    assert message.startswith("tsv:/x.tsv: of 3 tokens 33.3% are the unknown token of data.tokenizer=")


def test_padding_is_the_special_token():
    special = types.SimpleNamespace(pad=7, cls=8, sep=9)
    table = table_of([TaskRow(("a",), (), 0)])
    source = ClassificationExamples(
        table, classes=("a", "b"), tokenizer=ByteTokenizer(), special=special, seq_len=5, truncate=False
    )
    assert source.example(0, epoch=0)["tokens"].tolist() == [8, 97, 9, 7, 7]


def test_multiple_choice():
    example = choices([TaskRow(("ab", "c?"), ("d", "ef"), 1)], seq_len=10).example(0, epoch=0)
    assert example["tokens"].tolist() == [
        [CLS, *b"ab", SEP, *b"c? d", SEP, PAD],
        [CLS, *b"ab", SEP, *b"c? ef", SEP],
    ]
    assert example["segments"].tolist() == [[1] * 9 + [0], [1] * 10]
    assert example["token_types"].tolist() == [[0] * 4 + [1] * 5 + [0], [0] * 4 + [1] * 6]
    assert (example["labels"], example["label_weights"]) == (1, 1)
    assert shapes(example) == {
        **dict.fromkeys(["tokens", "segments", "token_types"], ((2, 10), "int32")),
        "labels": ((), "int32"),
        "label_weights": ((), "float32"),
    }


def test_multiple_choice_without_a_question():
    example = choices([TaskRow(("ab",), ("d", "ef"), 0)], seq_len=8).example(0, epoch=0)
    assert example["tokens"].tolist() == [
        [CLS, *b"ab", SEP, *b"d", SEP, PAD, PAD],
        [CLS, *b"ab", SEP, *b"ef", SEP, PAD],
    ]


@given(
    st.lists(st.builds(lambda a, b, label: TaskRow((a, b), (), label), WORDS, WORDS, st.integers(0, 1)), min_size=1),
    st.integers(5, 30),
)
def test_pairs_are_cut_as_in_bert(rows, seq_len):
    source = classification(rows, seq_len=seq_len, truncate=True)
    cut = 0
    for index, row in enumerate(rows):
        example = source.example(index, epoch=0)
        first, second = (text.encode() for text in row.texts)
        cut += len(first) + len(second) > seq_len - 3
        texts = read_back(example["tokens"], example["segments"], example["token_types"])
        assert texts == cut_as_bert(first, second, seq_len - 3)
        assert example["labels"] == row.label
    assert source.num_cut == cut


@given(st.lists(WORDS, min_size=1), st.integers(3, 20))
def test_single_texts_are_cut_at_their_end(texts, seq_len):
    source = classification([TaskRow((text,), (), 0) for text in texts], seq_len=seq_len, truncate=True)
    for index, text in enumerate(texts):
        example = source.example(index, epoch=0)
        kept = [text.encode()[: seq_len - 2]]
        assert read_back(example["tokens"], example["segments"], example["token_types"]) == kept
    assert source.num_cut == sum(len(text.encode()) > seq_len - 2 for text in texts)


@given(
    st.lists(st.tuples(WORDS, WORDS, st.tuples(WORDS, WORDS, WORDS), st.integers(0, 2)), min_size=1, max_size=5),
    st.integers(5, 60),
)
def test_contexts_of_choices_are_cut(drawn, seq_len):
    rows = [TaskRow((context, question), answers, label) for context, question, answers, label in drawn]
    pairs = [[f"{row.texts[1]} {answer}".encode() for answer in row.choices] for row in rows]
    kept = [i for i in range(len(rows)) if max(map(len, pairs[i])) < seq_len - 3]
    if not kept:
        with pytest.raises(DataError, match=rf"no line is left of {2 + len(rows)}: .*{len(rows)} too long.*: questio"):
            choices(rows, seq_len=seq_len, truncate=True, skip=True)
        return
    source = choices(rows, seq_len=seq_len, truncate=True, skip=True)
    assert len(source) == len(kept)
    for index, i in enumerate(kept):
        example = source.example(index, epoch=0)
        forms = zip(example["tokens"], example["segments"], example["token_types"], strict=True)
        for answer, form in zip(pairs[i], forms, strict=True):
            assert read_back(*form) == [rows[i].texts[0].encode()[: seq_len - 3 - len(answer)], answer]
    longest = [len(rows[i].texts[0].encode()) + max(map(len, pairs[i])) for i in kept]
    assert source.num_cut == sum(length > seq_len - 3 for length in longest)


def test_too_long():
    rows = [TaskRow(("ab", "c"), (), 0), TaskRow(("abcdef", "ghi"), (), 0)]
    with pytest.raises(DataError) as raised:
        classification(rows, seq_len=11)
    assert str(raised.value) == (
        "tsv:/x.tsv, line 11: its texts take 12 tokens, [CLS] and [SEP] included, more than model.seq_len=11. Set "
        "data.truncate=True to cut the longer text at its end, or raise model.seq_len. Mend the line, or set "
        "data.skip_bad_lines=True to pass over lines like it."
    )
    assert len(classification(rows, seq_len=12)) == 2
    source = classification(rows, seq_len=11, skip=True)
    assert source.describe() == (
        "tsv:/x.tsv: 1 line, 3 passed over (2 not JSON, 1 too long), 0 cut to model.seq_len=11; always answering 'no' "
        "would be right for 100.0%"
    )


def test_choices_that_are_too_long():
    rows = [TaskRow(("ab",), ("c", "defg"), 0)]
    with pytest.raises(DataError, match=r"line 10: its texts take 9 tokens, .* model\.seq_len=8\. .* cut the context"):
        choices(rows, seq_len=8)
    assert choices(rows, seq_len=8, truncate=True).num_cut == 1
    with pytest.raises(DataError, match=r"line 10: question and choice take 4 tokens, .*seq_len=7, .* Raise model"):
        choices(rows, seq_len=7, truncate=True)


def test_no_room():
    with pytest.raises(ConfigError, match=r"model\.seq_len=2 has no room for 1 text beside .* Use at least 3\."):
        classification([TaskRow(("a",), (), 0)], seq_len=2)
    for make, row in ((classification, TaskRow(("a", "b"), (), 0)), (choices, TaskRow(("a",), ("b", "c"), 0))):
        with pytest.raises(ConfigError, match=r"model\.seq_len=4 has no room for 2 texts beside .* Use at least 5\."):
            make([row], seq_len=4)
        assert len(make([row], seq_len=5)) == 1


def test_nothing_to_learn_from():
    for make in (classification, choices):
        with pytest.raises(DataError, match=r"^tsv:/x\.tsv has no lines of data\."):
            make([])


def test_shares():
    source = classification([TaskRow((text,), (), label) for text, label in zip("abcd", (1, 1, 0, 1), strict=True)])
    assert source.shares.tolist() == [0.25, 0.75]
    assert source.shares.max() == 0.75
    assert source.describe().endswith(
        "4 lines, 0 cut to model.seq_len=12; always answering 'yes' would be right for 75.0%"
    )
    source = choices([TaskRow(("a",), ("b", "c"), label) for label in (0, 1, 0)])
    assert source.shares.max() == pytest.approx(2 / 3)
    assert source.describe().endswith("always answering 'choice 0' would be right for 66.7%")
    assert class_shares(np.array([2, 2, 0]), 4).tolist() == pytest.approx([1 / 3, 0, 2 / 3, 0])


def test_bounds():
    for source in (classification([TaskRow(("a",), (), 0)]), choices([TaskRow(("a",), ("b", "c"), 0)])):
        for index in (-1, 1):
            with pytest.raises(IndexError, match=f"example {index} of 1"):
                source.example(index, epoch=0)


def test_fingerprints_tell_data_apart():
    rows = [TaskRow(("ab", "c"), (), 0), TaskRow(("d", "e"), (), 1)]
    others = [
        [TaskRow(("ab", "c"), (), 0), TaskRow(("d", "e"), (), 0)],
        [TaskRow(("a", "bc"), (), 0), TaskRow(("d", "e"), (), 1)],
        [TaskRow(("ab", "c"), (), 0)],
        rows[::-1],
    ]
    prints = [classification(some).fingerprint() for some in (rows, *others)]
    assert len(set(prints)) == 5
    assert prints[0] == classification(list(rows)).fingerprint()
    assert prints[0].startswith("2-")


def test_large_vocabularies_and_batches(tmp_path, monkeypatch):
    monkeypatch.setattr("fiddlex.data.ragged._ROWS_AT_ONCE", 2)
    model = tokenizers.models.WordLevel({f"w{i}": i for i in range(70_000)}, unk_token="w0")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    rows = [TaskRow((f"w{69_990 + i} w{i}", f"w{i}"), (), 0) for i in range(5)]
    special = types.SimpleNamespace(pad=1, cls=2, sep=3)
    source = ClassificationExamples(
        table_of(rows),
        classes=("a", "b"),
        tokenizer=JsonTokenizer(tmp_path / "tokenizer.json"),
        special=special,
        seq_len=7,
        truncate=False,
    )
    for i in range(5):
        assert source.example(i, epoch=0)["tokens"].tolist() == [2, 69_990 + i, i, 3, i, 3, 1]
