import itertools
import re

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from fiddlex.data import ByteTokenizer, JsonTokenizer, SpecialTokens, require_special
from fiddlex.errors import DataError

TEXTS = st.text(st.sampled_from("self.arg_parse  \n\t'é三。！？!?.,x0#-"), min_size=1)
SENTENCE_ENDS = re.compile(r".*\n.*|.*[.!?。！？]", re.DOTALL)


@given(TEXTS)
@example("naïve (the_1st) word… 三つ，a.b")
def test_words_of_bytes(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    words = re.findall(rb"[0-9A-Za-z_\x80-\xff]+|[^0-9A-Za-z_\x80-\xff]", text.encode())
    expected = {0, *itertools.accumulate(len(word) for word in words[:-1])}
    assert set(np.flatnonzero(tokenizer.vocabulary.starts_words(ids))) == expected


@given(TEXTS)
def test_words_of_wordpiece_are_those_it_was_split_into(wordpiece, text):
    encoding = wordpiece._tokenizer.encode(text, add_special_tokens=False)
    starts = wordpiece.vocabulary.starts_words(np.array(encoding.ids, np.int32))
    words = [None, *encoding.word_ids]
    assert starts.tolist() == [word != before for before, word in itertools.pairwise(words)]


@given(TEXTS)
def test_words_of_byte_level_bpe_are_parted_by_whitespace(roberta, text):
    encoding = roberta._tokenizer.encode(text, add_special_tokens=False)
    starts = roberta.vocabulary.starts_words(np.array(encoding.ids, np.int32))
    around = [(text[max(start - 1, 0) : start] or " ") + text[start] for start, _ in encoding.offsets]
    same_character = [start == before for (before, _), (start, _) in itertools.pairwise([(-1, 0), *encoding.offsets])]
    expected = [any(map(str.isspace, pair)) and not same for pair, same in zip(around, same_character, strict=True)]
    assert starts.tolist() == expected


def test_words_of_sentencepiece(saved):
    pieces = ["▁the", "▁a", "rk", ".", "<0x0A>", "<0xE3>", "<0x85>", "Ġ"]
    tokenizer = saved(tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [])))
    starts = tokenizer.vocabulary.starts_words(np.array([0, 1, 2, 3, 4, 2, 5, 6, 7, 0, 3], np.int32))
    assert starts.tolist() == [True, True, False, False, True, True, False, False, False, True, False]
    assert np.flatnonzero(tokenizer.vocabulary.ends).tolist() == [3, 4]


@pytest.mark.parametrize("name", ["wordpiece", "roberta"])
def test_special_tokens_are_words_of_their_own(request, name):
    tokenizer = request.getfixturevalue(name)
    continuing = int(np.flatnonzero(tokenizer.vocabulary.joins_before & tokenizer.vocabulary.joins_after)[0])
    for special in tokenizer.vocabulary.special:
        ids = np.array([continuing, continuing, special, continuing, continuing], np.int32)
        assert tokenizer.vocabulary.starts_words(ids).tolist() == [True, False, True, True, False]


def test_words_that_are_not_marked(saved):
    tokenizer = saved(tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, ".": 2}, [])))
    assert not tokenizer.vocabulary.marks_words
    assert tokenizer.vocabulary.starts_words(np.array([0, 1, 2, 0])).all()
    assert tokenizer.vocabulary.ends_sentences(np.array([0, 1, 2, 0])).tolist() == [False, False, True, False]


@given(TEXTS)
def test_sentences_of_bytes(text):
    tokenizer = ByteTokenizer()
    ends = tokenizer.vocabulary.ends_sentences(tokenizer.encode(text))
    last_bytes = np.cumsum([len(character.encode()) for character in text]) - 1
    expected = [last for last, character in zip(last_bytes, text, strict=True) if SENTENCE_ENDS.fullmatch(character)]
    assert np.flatnonzero(ends).tolist() == expected


@pytest.mark.parametrize("name", ["wordpiece", "roberta"])
def test_sentences_end_with_a_mark_or_a_line(request, name):
    tokenizer = request.getfixturevalue(name)
    texts = tokenizer._tokenizer.decode_batch([[i] for i in range(tokenizer.vocab_size)], skip_special_tokens=False)
    expected = [i for i, text in enumerate(texts) if SENTENCE_ENDS.fullmatch(text)]
    assert np.flatnonzero(tokenizer.vocabulary.ends_sentences(np.arange(tokenizer.vocab_size))).tolist() == expected
    marks = {text.strip()[-1:] for text in texts if SENTENCE_ENDS.fullmatch(text)}
    assert marks >= ({".", "!", "?"} if name == "wordpiece" else {"", ".", "!", "?", "。"})  # "": blank lines


def test_special_bytes_are_in_no_text():
    tokenizer = ByteTokenizer()
    assert (
        tokenizer.vocabulary.special
        == SpecialTokens(pad=0, cls=0xFE, sep=0xFD, mask=0xFF)
        == require_special(tokenizer)
    )
    every = "".join(map(chr, [*range(1, 0xD800), *range(0xE000, 0x110000)]))
    assert np.unique(tokenizer.encode(every)).tolist() == tokenizer.vocabulary.drawable.tolist()
    assert np.flatnonzero(tokenizer.vocabulary.is_special).tolist() == sorted(tokenizer.vocabulary.special)


def test_special_tokens_of_bert_and_roberta(wordpiece, roberta):
    assert wordpiece.vocabulary.special == (0, 1, 2, 3) == require_special(wordpiece)
    assert roberta.vocabulary.special == SpecialTokens(pad=1, cls=0, sep=2, mask=4) == require_special(roberta)
    for tokenizer in (wordpiece, roberta):
        assert np.flatnonzero(tokenizer.vocabulary.is_special).tolist() == list(range(5))  # [UNK] and <unk> too
        assert tokenizer.vocabulary.drawable.tolist() == list(range(5, tokenizer.vocab_size))


def test_special_tokens_that_the_file_does_not_declare(saved):
    names = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "a"]
    tokenizer = saved(tokenizers.Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, "?")))
    assert tokenizer.vocabulary.is_special.tolist() == [True, True, True, True, False]
    assert tokenizer.vocabulary.drawable.tolist() == [4]


def test_ids_without_a_token_are_not_drawn(saved):
    tokenizer = saved(tokenizers.Tokenizer(models.WordLevel({"a": 1, "?": 2, "b": 4}, "?")))
    assert tokenizer.vocabulary.drawable.tolist() == [1, 4]
    assert tokenizer.vocabulary.is_special.tolist() == [False, False, True, False, False]  # what is unknown is no word


def with_tokens(saved, *names: str) -> JsonTokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"a": 0}, "a"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(names))
    return saved(tokenizer)


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (["[PAD]", "[CLS]", "[SEP]"], r"\[MASK\]"),
        (["<s>", "</s>", "[CLS]"], "<pad>, <mask>"),
        (["<|endoftext|>"], r"\[PAD\], \[CLS\], \[SEP\], \[MASK\]"),
    ],
)
def test_vocabulary_without_special_tokens(saved, names, missing):
    tokenizer = with_tokens(saved, *names)
    assert tokenizer.vocabulary.special is None
    message = rf"tokenizer\.json' is a vocabulary without {missing}: .*add_special_tokens, .*model\.vocab_size by as"
    with pytest.raises(DataError, match=message):
        require_special(tokenizer)


def test_what_the_error_advises_mends_it(saved):
    tokenizer = with_tokens(saved, "[PAD]", "[CLS]", "[SEP]")._tokenizer
    tokenizer.add_special_tokens(["[MASK]"])
    assert saved(tokenizer).vocabulary.special == SpecialTokens(pad=1, cls=2, sep=3, mask=4)


def test_tokenizer_that_is_not_known():
    with pytest.raises(DataError, match=r"tokenizer of these tokens is not known, .*Set data\.tokenizer to"):
        require_special(None)


def test_tokens_of_another_tokenizer(numbered):
    ids = numbered.vocabulary.checked(np.array([5, 1999], np.uint32))
    assert ids.dtype == np.int32
    for wrong in (2000, 2**32 - 1):
        message = rf"the data has token {wrong}, and data\.tokenizer='.*json' has 2000 tokens.*Set data\.tokenizer"
        with pytest.raises(DataError, match=message):
            numbered.vocabulary.checked(np.array([5, wrong], np.uint32))
