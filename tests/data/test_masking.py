import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models

from fiddlex.data import ByteTokenizer, max_masked
from fiddlex.data.masking import Masker, example_rng
from fiddlex.errors import DataError

# Counts are of fixed seeds, and their bounds 5 standard deviations: of other seeds one in a million would fail.
SIGMAS = 5
FRACTIONS = st.floats(0.01, 0.99)


def masker(tokenizer, seq_len: int, fraction: float, *, whole_words: bool = False) -> Masker:
    return Masker(tokenizer, seq_len=seq_len, mask_fraction=fraction, whole_words=whole_words)


def deviation(share: float, draws: int) -> float:
    return (share * (1 - share) * draws) ** 0.5


def chosen(masked: dict[str, np.ndarray]) -> np.ndarray:
    """The positions to predict, after checking that the rest is filler."""
    real = masked["weights"] == 1
    count = int(real.sum())
    assert real[:count].all()
    for name in ("masked_positions", "targets", "weights"):
        assert not masked[name][count:].any()
    return masked["masked_positions"][:count]


@given(
    tokens=st.lists(st.integers(0, 1999) | st.integers(0, 4), min_size=1, max_size=60),
    fraction=FRACTIONS,
    seed=st.integers(0, 2**31),
    whole_words=st.booleans(),
)
def test_masked(numbered, tokens, fraction, seed, whole_words):
    original = np.array(tokens, np.int32)
    rng = example_rng(seed, epoch=0, index=0)
    masked = masker(numbered, len(tokens), fraction, whole_words=whole_words).mask(original, rng)
    most = max_masked(len(tokens), fraction)
    assert most == max(1, round(fraction * len(tokens)))
    assert {name: (values.dtype.name, values.shape) for name, values in masked.items()} == {
        "tokens": ("int32", (len(tokens),)),
        "masked_positions": ("int32", (most,)),
        "targets": ("int32", (most,)),
        "weights": ("float32", (most,)),
    }
    positions = chosen(masked)
    num_maskable = int((original > 4).sum())  # each word of this vocabulary is a token
    assert len(positions) == (max(1, round(fraction * num_maskable)) if num_maskable else 0)
    assert (np.diff(positions) > 0).all()
    assert (original[positions] > 4).all()
    np.testing.assert_array_equal(masked["targets"][: len(positions)], original[positions])
    unmasked = np.delete(np.arange(len(tokens)), positions)
    np.testing.assert_array_equal(masked["tokens"][unmasked], original[unmasked])
    seen = masked["tokens"][positions]
    assert ((seen == numbered.vocabulary.special.mask) | (seen > 4)).all()


@pytest.mark.parametrize("name", ["bytes", "wordpiece", "roberta"])
@given(seed=st.integers(0, 2**31), fraction=st.floats(0.02, 0.6), start=st.integers(0, 2000))
def test_words_are_masked_whole_or_not_at_all(request, text_file, name, seed, fraction, start):
    tokenizer = ByteTokenizer() if name == "bytes" else request.getfixturevalue(name)
    original = tokenizer.encode(text_file.read_text(encoding="utf-8")[start : start + 300])[:64]
    starts = tokenizer.vocabulary.starts_words(original)
    words = np.split(np.arange(len(original)), np.flatnonzero(starts)[1:])
    words = [word for word in words if not tokenizer.vocabulary.is_special[original[word[0]]]]
    count = max_masked(sum(map(len, words)), fraction)
    rng = example_rng(seed, epoch=0, index=0)
    positions = chosen(masker(tokenizer, len(original), fraction, whole_words=True).mask(original, rng))
    if min(map(len, words)) > count:  # no word fits
        assert len(positions) == count
        return
    shares = [np.isin(word, positions).mean() for word in words]
    assert set(shares) <= {0, 1}
    left = count - len(positions)
    assert left >= 0
    assert all(len(word) > left for word, share in zip(words, shares, strict=True) if not share)


def test_words_longer_than_all_that_is_masked():
    rng = example_rng(0, epoch=0, index=0)
    seen = set()
    for _ in range(100):
        masked = masker(ByteTokenizer(), 20, 0.15, whole_words=True).mask(np.full(20, ord("a"), np.int32), rng)
        assert len(chosen(masked)) == 3
        seen.update(chosen(masked).tolist())
    assert seen == set(range(20))


def test_shares_of_mask_random_and_kept():
    original = np.full(50, ord("a"), np.int32)
    kinds, num_draws = np.zeros(3), 0
    replacements = []
    for index in range(6000):
        masked = masker(ByteTokenizer(), 50, 0.2).mask(original, example_rng(1, epoch=0, index=index))
        seen = masked["tokens"][chosen(masked)]
        num_draws += len(seen)
        kinds += [(seen == 0xFF).sum(), ((seen != 0xFF) & (seen != ord("a"))).sum(), (seen == ord("a")).sum()]
        replacements += seen[(seen != 0xFF) & (seen != ord("a"))].tolist()
    drawable = ByteTokenizer().vocabulary.drawable.tolist()
    same = 0.1 / len(drawable)  # of the random ones are what was there
    for count, share in zip(kinds, [0.8, 0.1 - same, 0.1 + same], strict=True):
        assert abs(count - share * num_draws) < SIGMAS * deviation(share, num_draws)
    values, counts = np.unique(replacements, return_counts=True)
    assert values.tolist() == [i for i in drawable if i != ord("a")]
    share = 1 / len(values)
    assert abs(counts - share * len(replacements)).max() < SIGMAS * deviation(share, len(replacements))


@pytest.mark.parametrize("whole_words", [False, True])
def test_every_position_is_as_likely(whole_words):
    original = np.frombuffer(b"\xfeab\xfdcd\xfdef\xfdgh\xfdij\xfd\0\0", np.uint8).astype(np.int32)
    maskable = (original >= ord("a")) & (original <= ord("j"))
    counts, draws = np.zeros(len(original)), 4000
    for index in range(draws):
        masked = masker(ByteTokenizer(), len(original), 0.4, whole_words=whole_words).mask(
            original, example_rng(2, epoch=0, index=index)
        )
        counts[chosen(masked)] += 1
    share = round(0.4 * maskable.sum()) / maskable.sum()
    assert not counts[~maskable].any()
    assert abs(counts[maskable] - share * draws).max() < SIGMAS * deviation(share, draws)


def test_random_numbers_of_examples_are_apart():
    places = [(seed, epoch, index) for seed in (0, 1) for epoch in (0, 1) for index in (0, 1)]
    draws = [example_rng(seed, epoch=epoch, index=index).random(100) for seed, epoch, index in places]
    assert len(np.unique(np.concatenate(draws))) == 100 * len(places)
    np.testing.assert_array_equal(draws[3], example_rng(0, epoch=1, index=1).random(100))


def test_whole_words_of_a_vocabulary_that_marks_none(saved):
    tokenizer = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    tokenizer.add_special_tokens(["[PAD]", "[CLS]", "[SEP]", "[MASK]"])
    letters = saved(tokenizer)
    masker(letters, 8, 0.15)
    with pytest.raises(
        DataError, match=r"data\.whole_words=True with data\.tokenizer='.*json', .*whole_words=False or"
    ):
        masker(letters, 8, 0.15, whole_words=True)
