import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, processors

from fiddlex.data import (
    ByteTokenizer,
    Continuation,
    ContinuationExamples,
    JsonTokenizer,
    ScoredEnds,
    Table,
    read_continuations,
)
from fiddlex.errors import DataError

WORDS = st.text("abcé", min_size=1, max_size=8)


def write(path: Path, lines: list) -> str:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return f"jsonl:{path}"


def table_of(rows: list[Continuation], *, skip: bool = False) -> Table[Continuation]:
    lines = [10 + i for i in range(len(rows))]
    return Table("jsonl:/x.jsonl", lines, rows, skip_bad_lines=skip, skipped=Counter())


def examples(rows: list[Continuation], *, seq_len=16, tokenizer=None, skip=False) -> ContinuationExamples:
    return ContinuationExamples(table_of(rows, skip=skip), tokenizer=tokenizer or ByteTokenizer(), seq_len=seq_len)


def scored(example) -> list[int]:
    return example["targets"][example["weights"] == 1].tolist()


@pytest.fixture(scope="module")
def bpe(tmp_path_factory) -> JsonTokenizer:
    """As GPT-2's, a space belongs to the word after it; it merges "ab", "abc" and " a", and has a separator."""
    vocab = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "abc", "Ġa", "<|endoftext|>"]
    merges = [("a", "b"), ("ab", "c"), ("Ġ", "a")]
    tokenizer = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(vocab)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    tokenizer.save(str(path))
    return JsonTokenizer(path)


def test_three_forms(tmp_path):
    lines = [
        {"context": "The cat sat on the", "continuation": " mat", "id": 7},
        {"text": "  The cat sat  on the\n mat. \n"},
        {"text": "mat"},
        {"context": "", "continuation": "x y"},
    ]
    table = read_continuations(write(tmp_path / "x.jsonl", lines), skip_bad_lines=False)
    assert table.rows == [
        Continuation("The cat sat on the", (" mat",), 0),
        Continuation("The cat sat  on the", ("\n mat.",), 0),
        Continuation("", ("mat",), 0),
        Continuation("", ("x y",), 0),
    ]
    lines = [
        {"context": "The", "choices": [" a", " b"], "label": 1},
        {"context": "The", "choices": [" a", " b", " c"], "label": "C"},
    ]
    table = read_continuations(write(tmp_path / "x.jsonl", lines), skip_bad_lines=False)
    assert table.rows == [Continuation("The", (" a", " b"), 1), Continuation("The", (" a", " b", " c"), 2)]


@given(st.text(st.characters(blacklist_characters="\0", codec="utf-8")).filter(str.strip))
def test_last_words(tmp_path_factory, text):
    source = write(tmp_path_factory.getbasetemp() / "last.jsonl", [{"text": text}])
    (row,) = read_continuations(source, skip_bad_lines=False).rows
    assert row.context + row.choices[0] == text.strip()
    assert row.choices[0].split() == text.split()[-1:]
    assert row.context == row.context.rstrip()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            {"context": "x"},
            "it has none of the keys 'text', 'continuation' and 'choices', and must have one of them. The keys of "
            "texts to be continued are fixed, whatever data.text_fields and the like say: 'text'; 'context' and "
            "'continuation'; or 'context', 'choices' and 'label'.",
        ),
        ({"text": "x y", "continuation": " z"}, "it has 'text' and 'continuation' of the keys 'text', 'continuation'"),
        ({"continuation": "x"}, "there is no key 'context'. Known: continuation."),
        ({"context": None, "continuation": "x"}, "'context' is None, and must be a string."),
        ({"context": "x", "continuation": ""}, "'continuation' is '', and must not be empty."),
        ({"text": " \n"}, "'text' is ' \\n', and must not be empty."),
        ({"context": "x", "choices": [" a"], "label": 0}, "'choices' has 1, and must have at least 2."),
        ({"context": "x", "choices": " a", "label": 0}, "'choices' is ' a', and must be a list of strings."),
        ({"context": "x", "choices": [" a", ""], "label": 0}, "'choices[1]' is '', and must not be empty."),
        ({"context": "x", "choices": [" a", " b"], "label": 2}, "'label' is 2, and must be the right choice's index"),
        ({"context": "x", "choices": [" a", " b"]}, "there is no key 'label'. Known: context, choices."),
        (
            {"context": "x", "choices": [" a", " b"], "label": 0},
            "it has choices, other than line 1: accuracy means another thing with them. Put them into a file of their",
        ),
    ],
)
def test_bad_lines(tmp_path, line, message):
    source = write(tmp_path / "x.jsonl", [{"text": "a b"}, line, {"text": "c d"}])
    with pytest.raises(DataError) as raised:
        read_continuations(source, skip_bad_lines=False)
    assert str(raised.value).startswith(f"{source}, line 2: {message}")
    table = read_continuations(source, skip_bad_lines=True)
    assert (table.lines, table.skipped.total()) == ([1, 3], 1)


def test_lines_without_choices_among_others(tmp_path):
    source = write(tmp_path / "x.jsonl", ["", {"context": "", "choices": ["a", "b"], "label": 0}, {"text": "c"}])
    with pytest.raises(DataError, match=r"x\.jsonl, line 3: it has no choices, other than line 2: "):
        read_continuations(source, skip_bad_lines=False)


def test_a_continuation():
    example = examples([Continuation("ab", (" cd",), 0)], seq_len=7).example(0, epoch=2)
    assert bytes(example["tokens"].astype(np.uint8)) == b"ab cd\0\0"
    assert bytes(example["targets"].astype(np.uint8)) == b"b cd\0\0\0"
    assert example["weights"].tolist() == [0, 1, 1, 1, 0, 0, 0]
    assert {name: values.dtype.name for name, values in example.items()} == {
        "tokens": "int32",
        "targets": "int32",
        "weights": "float32",
    }


def test_an_empty_context_begins_with_the_separator(bpe):
    example = examples([Continuation("", ("xyz",), 0)], seq_len=4).example(0, epoch=0)
    assert example["tokens"].tolist() == [0, *b"xyz"]  # the last is filled up: it predicts nothing
    assert scored(example) == list(b"xyz")
    example = examples([Continuation("", ("xyz",), 0)], seq_len=4, tokenizer=bpe).example(0, epoch=0)
    assert example["tokens"].tolist() == [bpe.separator, *bpe.encode("xyz")]
    assert scored(example) == bpe.encode("xyz").tolist()


def test_long_contexts_keep_their_end():
    source = examples([Continuation("abcdefgh", ("xyz",), 0), Continuation("a", ("xyz",), 0)], seq_len=5)
    example = source.example(0, epoch=0)
    assert bytes(example["tokens"].astype(np.uint8)) == b"fghxy"
    assert example["weights"].tolist() == [0, 0, 1, 1, 1]
    assert source.num_cut == 1
    assert source.describe() == (
        "jsonl:/x.jsonl: 2 lines, 2 continuations; of 1 the context is cut at its start to model.seq_len=5"
    )
    full = examples([Continuation("abcdefgh", ("vwxyz",), 0)], seq_len=5).example(0, epoch=0)
    assert bytes(full["tokens"].astype(np.uint8)) == b"hvwxy"
    assert full["weights"].tolist() == [1] * 5


@given(
    st.lists(st.builds(Continuation, WORDS, st.tuples(WORDS, WORDS), st.integers(0, 1)), min_size=1, max_size=6),
    st.integers(16, 24),
)
def test_rows_to_tokens_and_back(lines, seq_len):
    source = examples(lines, seq_len=seq_len)
    assert len(source) == 2 * len(lines)
    rows = source.rows
    assert rows.labels.tolist() == [line.label for line in lines]
    assert rows.has_choices
    for index in range(len(source)):
        number = int(np.searchsorted(rows.first, index, side="right")) - 1
        line, choice = lines[number], index - int(rows.first[number])
        example, text = source.example(index, epoch=0), line.choices[choice].encode()
        assert bytes(scored(example)) == text
        assert len(text) == rows.num_bytes[index] == rows.num_tokens[index] == example["weights"].sum()
        start = int(np.argmax(example["weights"]))
        assert line.context.encode().endswith(bytes(example["tokens"][: start + 1].astype(np.uint8)))
        assert start + len(text) == min(len(line.context.encode()) + len(text) - 1, seq_len)


def test_lines_of_several_lengths():
    lines = [Continuation("x", ("a", "bé"), 1), Continuation("x", ("c", "d", "e"), 0)]
    rows = examples(lines).rows
    assert rows.first.tolist() == [0, 2, 5]
    assert rows.first.tolist() == [0, 2, 5]
    assert rows.num_bytes.tolist() == [1, 3, 1, 1, 1]
    assert not examples([Continuation("x", ("a",), 0)]).rows.has_choices


@given(context=st.text("ab c", max_size=6), continuation=st.text("ab c", min_size=1, max_size=6))
def test_tokens_are_those_of_the_whole_text(bpe, context, continuation):
    source = examples([Continuation(context, (continuation,), 0)], tokenizer=bpe)
    example = source.example(0, epoch=0)
    whole, alone = bpe.encode(context + continuation).tolist(), bpe.encode(context).tolist()
    num_tokens = int(source.rows.num_tokens[0])
    assert scored(example) == whole[len(whole) - num_tokens :]
    before = whole[: len(whole) - num_tokens]
    assert example["tokens"][: len(before) or 1].tolist() == before or [bpe.separator]
    # The context's tokens as far as they are the whole's, and no further.
    assert before == alone[: len(before)]
    assert alone[len(before) : len(before) + 1] != whole[len(before) : len(before) + 1]


def test_tokens_across_the_boundary(bpe):
    ab, abc, c = bpe.encode("ab").tolist(), bpe.encode("abc").tolist(), bpe.encode("c").tolist()
    assert (len(ab), len(abc)) == (1, 1)  # or this tests nothing
    example = examples([Continuation("cab", ("c",), 0)], tokenizer=bpe).example(0, epoch=0)
    assert example["tokens"][:2].tolist() == [*c, *abc]
    assert scored(example) == abc
    example = examples([Continuation("ab", ("c",), 0)], tokenizer=bpe).example(0, epoch=0)
    assert example["tokens"][:2].tolist() == [bpe.separator, *abc]
    assert scored(example) == abc


def test_continuations_that_are_too_long():
    lines = [Continuation("a", ("x", "y"), 0), Continuation("a", ("x", "abcdef"), 0)]
    with pytest.raises(DataError, match=r"line 11: a continuation takes 6 tokens, .*=5, .* Raise model\.seq_len"):
        examples(lines, seq_len=5)
    source = examples(lines, seq_len=5, skip=True)
    assert len(source) == 2
    assert source.describe().startswith("jsonl:/x.jsonl: 1 line, 1 passed over (1 too long), 2 continuations; of 0 ")
    assert len(examples(lines, seq_len=6)) == 4


def test_continuations_that_cannot_be_scored(tmp_path):
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    steps = [pre_tokenizers.Split("#", "removed"), pre_tokenizers.Whitespace()]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    words = JsonTokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match=r"line 10: a continuation adds no token to its context\. Mend"):
        examples([Continuation("a", (" #",), 0)], tokenizer=words)
    with pytest.raises(DataError, match=r"line 10: no token comes before .* data\.tokenizer has no separator"):
        examples([Continuation("", (" a",), 0)], tokenizer=words)


def test_bounds():
    source = examples([Continuation("a", ("b",), 0)])
    for index in (-1, 1):
        with pytest.raises(IndexError, match=f"example {index} of 1"):
            source.example(index, epoch=0)


@given(data=st.data(), seq_len=st.integers(1, 6))
def test_the_ends_of_sequences_are_scored(data, seq_len):
    sequences = []
    for _ in range(data.draw(st.integers(1, 4))):
        ids = np.arange(1, 1 + data.draw(st.integers(2, 10)), dtype=np.int32)
        sequences.append((ids, data.draw(st.integers(1, min(seq_len, len(ids) - 1)))))
    source = ScoredEnds(sequences, seq_len=seq_len)
    assert len(source) == len(sequences)
    for i, (ids, number) in enumerate(sequences):
        example, kept = source.example(i, epoch=0), ids[-seq_len - 1 :].tolist()
        assert scored(example) == ids[len(ids) - number :].tolist()
        assert example["tokens"][: len(kept) - 1].tolist() == kept[:-1]
        assert example["targets"][: len(kept) - 1].tolist() == kept[1:]
        assert not example["tokens"][len(kept) :].any()


@pytest.mark.parametrize("number", [0, 3])
def test_something_of_each_sequence_is_scored(number):
    with pytest.raises(DataError, match=f"{number} of 3 tokens are to be scored with model.seq_len=4"):
        ScoredEnds([(np.arange(3), number)], seq_len=4)


@pytest.mark.parametrize("context", ["", "ab", "<|endoftext|>ab", "xy"])
def test_a_text_begins_as_the_tokenizer_file_says(bpe, tmp_path, context):
    """As for generation and lm-evaluation-harness; a beginning that is there is not put there again."""
    made = tokenizers.Tokenizer.from_str(bpe._tokenizer.to_str())
    made.add_special_tokens(["<|endoftext|>"])
    made.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", bpe.separator)]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    source = examples([Continuation(context, ("c a",), 0)], tokenizer=JsonTokenizer(tmp_path / "tokenizer.json"))
    whole = made.encode(context.removeprefix("<|endoftext|>") + "c a").ids
    assert whole[0] == bpe.separator
    assert source.example(0, epoch=0)["tokens"][: len(whole) - 1].tolist() == whole[:-1]
    assert scored(source.example(0, epoch=0)) == whole[-2:]  # "ab" merges with "c"
