import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fiddlex.data import ByteTokenizer, Document, EvalBatches, Loader, SentencePairExamples, TokenStream
from fiddlex.data.corpus import encode_documents
from fiddlex.errors import DataError
from tests.data.masked import CLS, PAD, SEP, restored, stream_of

OBJECTIVES = st.sampled_from(["mlm_nsp", "mlm_sop"])
LENGTHS = st.lists(st.integers(0, 60) | st.integers(0, 4), min_size=1, max_size=10)
SIGMAS = 5  # standard deviations of counts that fixed seeds give


def make(stream, tokenizer, objective: str, **options) -> SentencePairExamples:
    defaults = {"seq_len": 24, "mask_fraction": 0.2, "whole_words": False, "seed": 0}
    return SentencePairExamples(stream, tokenizer, objective=objective, **(defaults | options))


def windows_of(stream: TokenStream, room: int) -> list[list[int]]:
    documents = [stream.tokens[start:stop].tolist() for start, stop in stream.bounds.tolist()]
    windows = [document[i : i + room] for document in documents for i in range(0, len(document), room)]
    return [window for window in windows if len(window) > 1]


def cuts_of(window: list[int]) -> list[int]:
    """The tokens with which B may begin in a window of this vocabulary, in which every token is a word."""
    return [token for token in window[1:] if (token - 1) % 7 == 0] or window[1:]


def sentences(example) -> tuple[list[int], list[int]]:
    """Both sentences as they were before masking, after checking the form of the example."""
    tokens = restored(example)
    assert not np.isin(example["targets"][example["weights"] == 1], [PAD, CLS, SEP]).any()
    length, seq_len = int(example["segments"].sum()), len(tokens)
    first_length = length - int(example["token_types"].sum())
    assert example["segments"].tolist() == [1] * length + [0] * (seq_len - length)
    assert example["token_types"].tolist() == (
        [0] * first_length + [1] * (length - first_length) + [0] * (seq_len - length)
    )
    assert (tokens[0], tokens[first_length - 1], tokens[length - 1]) == (CLS, SEP, SEP)
    assert (tokens[length:] == PAD).all()
    assert (example["labels"].shape, example["labels"].dtype) == ((), np.int32)
    assert (example["label_weights"].shape, example["label_weights"].dtype) == ((), np.float32)
    assert example["label_weights"] == 1
    return tokens[1 : first_length - 1].tolist(), tokens[first_length : length - 1].tolist()


def is_run(tokens: list[int]) -> bool:
    return bool(tokens) and tokens == list(range(tokens[0], tokens[0] + len(tokens)))


@given(lengths=LENGTHS, seq_len=st.integers(5, 30), objective=OBJECTIVES, epoch=st.integers(0, 3))
def test_pairs(numbered, lengths, seq_len, objective, epoch):
    stream, room = stream_of(lengths), seq_len - 3
    windows = windows_of(stream, room)
    assume(len(windows) > (objective == "mlm_nsp"))
    source = make(stream, numbered, objective, seq_len=seq_len)
    assert len(source) == len(windows)
    for index, window in enumerate(windows):
        example = source.example(index, epoch=epoch)
        first, second = sentences(example)
        assert is_run(first)
        assert is_run(second)
        follows = second[0] == first[-1] + 1
        assert example["labels"] == follows
        if follows or objective == "mlm_sop":
            assert (first + second if follows else second + first) == window
            assert max(first[0], second[0]) in cuts_of(window)
        else:
            check_random_second(stream, windows, window, first, second, room)


def check_random_second(stream, windows, window, first, second, room):
    """B of a wrong pair: from another document if there is one, begun where some window is cut, as long as can be."""
    assert first == window[: len(first)]
    assert first[-1] + 1 in cuts_of(window)
    (origin,) = (other for other in windows if second[0] in other)
    assert second[0] in cuts_of(origin)
    documents = [range(stream.tokens[start], stream.tokens[stop - 1] + 1) for start, stop in stream.bounds.tolist()]
    with_pairs = [document for document in documents if len(document) > 1]
    (own,) = (document for document in documents if first[0] in document)
    (other,) = (document for document in documents if second[0] in document)
    assert (own == other) == (len(with_pairs) == 1)
    last = first[0] - 1 if own == other and second[0] < first[0] else other[-1]
    assert second[-1] == min(second[0] + room - len(first) - 1, last)


@pytest.mark.parametrize("objective", ["mlm_nsp", "mlm_sop"])
def test_both_labels_come_about_as_often(numbered, objective):
    source = make(stream_of([300, 200, 400]), numbered, objective)
    labels = [source.example(i, epoch=epoch)["labels"] for epoch in range(100) for i in range(len(source))]
    assert abs(sum(labels) - len(labels) / 2) < SIGMAS * len(labels) ** 0.5 / 2
    # Each example has both labels in turn.
    assert 0 < sum(labels[:: len(source)]) < 100


def test_wrong_sentences_come_from_all_other_documents(numbered):
    stream = stream_of([22, 100, 40, 21])
    source = make(stream, numbered, "mlm_nsp", seq_len=24)
    examples = [source.example(0, epoch=epoch) for epoch in range(800)]
    seconds = [sentences(example)[1] for example in examples if not example["labels"]]
    starts = stream.tokens[stream.bounds[:, 0]].tolist()
    documents = np.searchsorted(starts, [second[0] for second in seconds], side="right") - 1
    counts = np.bincount(documents, minlength=4)
    assert counts[0] == 0
    deviation = (len(seconds) * 2 / 9) ** 0.5
    assert abs(counts[1:] - len(seconds) / 3).max() < SIGMAS * deviation
    windows = [second[0] // 21 for second in seconds if starts[1] <= second[0] < starts[2]]
    assert len(set(windows)) >= 5


def test_each_epoch_cuts_anew(numbered):
    stream = stream_of([40])
    source = make(stream, numbered, "mlm_sop", seq_len=43)
    firsts = [min(sentences(source.example(0, epoch=epoch))) for epoch in range(200)]
    assert {first[-1] for first in firsts} == {14, 21, 28, 35, 42}
    without_ends = make(TokenStream(np.arange(15, 20)), numbered, "mlm_sop")
    firsts = [min(sentences(without_ends.example(0, epoch=epoch))) for epoch in range(200)]
    assert {first[-1] for first in firsts} == {15, 16, 17, 18}


def test_bytes_are_cut_after_sentences_else_before_words():
    tokenizer = ByteTokenizer()

    def seconds(text: str) -> set[str]:
        source = make(encode_documents([Document("", text)], tokenizer), tokenizer, "mlm_sop", seq_len=40)
        examples = [source.example(0, epoch=epoch) for epoch in range(100)]
        pairs = [bytes(restored(example).astype(np.uint8)) for example in examples if example["labels"]]
        return {pair.split(b"\xfd")[1].decode() for pair in pairs}

    assert seconds("What?! No. 二。三") == {" No. 二。三", " 二。三", "三"}
    assert seconds("two words.") == {" words.", "words.", "."}
    assert seconds("word") == {"ord", "rd", "d"}


@pytest.mark.parametrize("objective", ["mlm_nsp", "mlm_sop"])
def test_batches(numbered, objective):
    source = make(stream_of([100, 200, 3]), numbered, objective, whole_words=True)
    loaded = Loader(source, global_batch_size=8, seed=0, vocab_size=2000)
    batches = [*loaded.iterate(0, num_steps=4)]
    assert {name: (values.shape, values.dtype.name) for name, values in batches[0].items()} == {
        "tokens": ((8, 24), "int32"),
        "segments": ((8, 24), "int32"),
        "token_types": ((8, 24), "int32"),
        "masked_positions": ((8, 5), "int32"),
        "targets": ((8, 5), "int32"),
        "weights": ((8, 5), "float32"),
        "labels": ((8,), "int32"),
        "label_weights": ((8,), "float32"),
    }
    wide = Loader(source, global_batch_size=32, seed=0, vocab_size=2000).batch(0)
    for name, values in wide.items():
        np.testing.assert_array_equal(values, np.concatenate([batch[name] for batch in batches]))
    *_, last = EvalBatches(source, batch_size=10, vocab_size=2000)
    assert last["label_weights"].tolist() == [1] * (len(source) % 10) + [0] * (-len(source) % 10)


def test_pairs_that_cannot_be_made(numbered):
    source = make(stream_of([30]), numbered, "mlm_sop")
    for index in (-1, 2):
        with pytest.raises(IndexError, match=f"example {index} of 2"):
            source.example(index, epoch=0)
    with pytest.raises(DataError, match=r"model\.seq_len=4 must be at least 5 with model\.objective=mlm_sop"):
        make(stream_of([30]), numbered, "mlm_sop", seq_len=4)
    for lengths in ([], [1, 1]):
        message = rf"no document has the two tokens that a pair takes \({len(lengths)} documents\)"
        with pytest.raises(DataError, match=message):
            make(stream_of(lengths), numbered, "mlm_nsp")
    make(stream_of([21]), numbered, "mlm_sop")
    with pytest.raises(DataError, match=r"only one document of 21 tokens, .*model\.seq_len=24.*objective=mlm_sop\."):
        make(stream_of([21]), numbered, "mlm_nsp")
