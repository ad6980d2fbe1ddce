import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fiddlex.config import DataConfig
from fiddlex.data import ByteTokenizer, EvalBatches, Loader, MaskedExamples, TokenStream, load_corpus, max_masked
from fiddlex.errors import DataError
from tests.data.masked import CLS, PAD, SEP, restored, stream_of

LENGTHS = st.lists(st.integers(0, 40) | st.integers(0, 6), min_size=1, max_size=12).filter(any)


def make(stream, tokenizer, **options) -> MaskedExamples:
    defaults = {"seq_len": 12, "mask_fraction": 0.3, "whole_words": False, "pack": True, "seed": 0}
    return MaskedExamples(stream, tokenizer, **(defaults | options))


def pieces_of(example) -> list[list[int]]:
    """The text of each segment, after checking the tokens around it and what fills up."""
    tokens, segments = restored(example), example["segments"]
    assert (np.diff(segments[segments > 0]) >= 0).all()
    assert (segments[: (segments > 0).sum()] > 0).all()
    assert (tokens[segments == 0] == PAD).all()
    assert not example["token_types"].any()
    pieces = []
    for segment in range(1, segments.max() + 1):
        first, *text, last = tokens[segments == segment].tolist()
        assert (first, last) == (CLS, SEP)
        pieces.append(text)
    return pieces


@given(lengths=LENGTHS, seq_len=st.integers(3, 20), pack=st.booleans(), epoch=st.integers(0, 3))
def test_every_token_is_in_one_example(numbered, lengths, seq_len, pack, epoch):
    stream = stream_of(lengths)
    source = make(stream, numbered, seq_len=seq_len, pack=pack)
    examples = [pieces_of(source.example(i, epoch=epoch)) for i in range(len(source))]
    pieces = [piece for example in examples for piece in example]
    assert sorted(token for piece in pieces for token in piece) == stream.tokens[stream.tokens != SEP].tolist()
    expected = []
    for start, stop in stream.bounds.tolist():
        document = stream.tokens[start:stop].tolist()
        expected += [document[i : i + seq_len - 2] for i in range(0, len(document), seq_len - 2)]
    assert sorted(pieces) == expected  # pieces lie in one document and are cut nowhere else
    last_pieces = [example[-1] for example in examples]
    assert last_pieces == sorted(last_pieces)
    assert all(example == sorted(example) for example in examples)


@given(lengths=LENGTHS, seq_len=st.integers(3, 20))
def test_packing_leaves_no_room_for_the_next_piece(numbered, lengths, seq_len):
    stream = stream_of(lengths)
    alone, packed = (make(stream, numbered, seq_len=seq_len, pack=pack) for pack in (False, True))
    assert all(len(pieces_of(alone.example(i, epoch=0))) == 1 for i in range(len(alone)))
    shared = [pieces_of(packed.example(i, epoch=0)) for i in range(len(packed))]
    shared = [example for example in shared if len(example[0]) < seq_len - 2]
    for example, following in itertools.pairwise(shared):
        assert sum(len(piece) + 2 for piece in [*example, following[0]]) > seq_len
    assert len(alone) - len(packed) == sum(len(example) - 1 for example in shared)


def test_a_packed_example(numbered):
    source = make(stream_of([2, 1, 9]), numbered, seq_len=9, mask_fraction=0.01)
    assert len(source) == 3  # the second's last two tokens do not fit beside the others
    example = source.example(0, epoch=0)
    assert restored(example).tolist() == [CLS, 10, 11, SEP, CLS, 13, SEP, PAD, PAD]
    assert example["segments"].tolist() == [1, 1, 1, 1, 2, 2, 2, 0, 0]
    assert {name: (values.dtype.name, values.shape) for name, values in example.items()} == {
        "tokens": ("int32", (9,)),
        "segments": ("int32", (9,)),
        "token_types": ("int32", (9,)),
        "masked_positions": ("int32", (1,)),
        "targets": ("int32", (1,)),
        "weights": ("float32", (1,)),
    }
    assert restored(source.example(1, epoch=0)).tolist() == [CLS, *range(15, 22), SEP]
    assert restored(source.example(2, epoch=0)).tolist() == [CLS, 22, 23, SEP, *[PAD] * 5]


def test_masks_differ_between_epochs_indices_and_seeds(numbered):
    stream = stream_of([1500])
    masks = {}
    for seed in (0, 1):
        source = make(stream, numbered, seq_len=502, seed=seed)
        for epoch in (0, 1):
            for index in range(len(source)):
                example = source.example(index, epoch=epoch)
                masks[seed, epoch, index] = tuple(example["masked_positions"])
                again = make(stream, numbered, seq_len=502, seed=seed).example(index, epoch=epoch)
                for name, values in example.items():
                    np.testing.assert_array_equal(values, again[name])
    assert len(set(masks.values())) == len(masks) == 12


def test_batch_sizes_and_threads_change_nothing(numbered):
    source = make(stream_of([37, 5, 200, 3, 8] * 3), numbered, whole_words=True)

    def rows(batches) -> dict[str, list]:
        batches = list(batches)
        return {name: np.concatenate([batch[name] for batch in batches]).tolist() for name in batches[0]}

    assert 50 < len(source) < 90  # so that the second epoch is among them
    expected = rows(loader_of(source, 2).batch(step) for step in range(45))
    assert expected == rows(loader_of(source, 2).iterate(0, num_steps=45))
    assert expected == rows(loader_of(source, 15).iterate(0, num_steps=6))


def loader_of(source, batch_size: int) -> Loader:
    return Loader(source, global_batch_size=batch_size, seed=3, vocab_size=2000)


def test_evaluation_fills_up_with_rows_of_zeros(numbered):
    source = make(stream_of([50]), numbered)
    (batch,) = EvalBatches(source, batch_size=8, vocab_size=2000)
    assert batch["weights"].shape == (8, max_masked(12, 0.3))
    assert not any(values[len(source) :].any() for values in batch.values())
    np.testing.assert_array_equal(batch["tokens"][2], source.example(2, epoch=0)["tokens"])


@pytest.mark.parametrize("name", ["bytes", "wordpiece", "roberta"])
def test_text_of_a_folder(request, tmp_path, text_file, name):
    tokenizer = ByteTokenizer() if name == "bytes" else request.getfixturevalue(name)
    text = text_file.read_text(encoding="utf-8")
    for i in range(6):
        (tmp_path / f"{i}.txt").write_text(text[400 * i :][: 10 + 90 * i])
    spec = "bytes" if name == "bytes" else tokenizer.vocabulary.name
    config = DataConfig(source=f"text:{tmp_path}", tokenizer=spec, eval_fraction=0)
    corpus = load_corpus(config, vocab_size=600, seq_len=64)
    source = make(corpus.train, corpus.tokenizer, seq_len=64, whole_words=True)
    examples = [source.example(i, epoch=0) for i in range(len(source))]
    special = tokenizer.vocabulary.special
    documents = []
    for example in examples:
        tokens = restored(example)
        assert not np.isin(tokens[example["masked_positions"][example["weights"] == 1]], special).any()
        documents += [tokens[example["segments"] == i][1:-1] for i in range(1, example["segments"].max() + 1)]
    assert len(documents) > len(examples)
    assert sum(map(len, documents)) == sum(len(tokenizer.encode(text[400 * i :][: 10 + 90 * i])) for i in range(6))


def test_document_of_special_tokens_only(numbered):
    example = make(TokenStream(np.array([4, 4, 4], np.uint8)), numbered).example(0, epoch=0)
    assert example["tokens"].tolist() == [CLS, 4, 4, 4, SEP, *[PAD] * 7]
    assert not example["weights"].any()
    assert not example["masked_positions"].any()


def test_examples_that_cannot_be_made(numbered):
    source = make(stream_of([30]), numbered)
    for index in (-1, 3):
        with pytest.raises(IndexError, match=f"example {index} of 3"):
            source.example(index, epoch=0)
    with pytest.raises(DataError, match=r"model\.seq_len=2 must be at least 3: an example is a first token, text and"):
        make(stream_of([30]), numbered, seq_len=2)
    for tokens in ([], [SEP, SEP]):
        with pytest.raises(DataError, match=r"there are no documents.*Use more data"):
            make(TokenStream(np.array(tokens, np.uint8), separator=SEP), numbered)
    with pytest.raises(DataError, match=r"tokenizer of these tokens is not known"):
        make(stream_of([30]), None)
    with pytest.raises(DataError, match=r"the data has token 2000, and data\.tokenizer"):
        make(TokenStream(np.array([7, 2000], np.uint16)), numbered).example(0, epoch=0)
