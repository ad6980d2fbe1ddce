"""What the tokens of a vocabulary are: which are special, begin words or end sentences.

Invariant: facts are arrays by id, computed once from the vocabulary, and two neighbouring tokens are the most that is
looked at to tell words apart; no text is read.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import tokenizers
from tokenizers import decoders, models

from fiddlex.errors import DataError

# pad, cls, sep and mask as BERT and RoBERTa name them.
SPECIAL_NAMES = (("[PAD]", "[CLS]", "[SEP]", "[MASK]"), ("<pad>", "<s>", "</s>", "<mask>"))
_SENTENCE_ENDS = (".", "!", "?", "。", "！", "？")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # SentencePiece's name of a byte that no other token covers


class SpecialTokens(NamedTuple):
    """Ids of the tokens that examples of BERT have besides the text."""

    pad: int  # fills up
    cls: int  # begins an example, or each document of a packed one
    sep: int  # ends each sentence of a pair, or each document
    mask: int  # in place of a token to be predicted


@dataclasses.dataclass(frozen=True, eq=False)
class Vocabulary:
    """Facts about the tokens of one tokenizer.

    Attributes:
      name: as `data.tokenizer` has it.
      special: None when the vocabulary lacks any of them.
      missing: names of those that it lacks; empty when there are all.
      is_special: bool[ids]: the special tokens and others that are no text ([UNK]); these are never masked.
      drawable: int32[n]: the ids that may stand for a masked token; all but the special ones and those unused.
      marks_words: the vocabulary tells where words begin.
      joins_before, joins_after: bool[ids]: a token that joins what is before it continues the word of a token that
        joins what is after it.
      ends: bool[ids]: the token ends a sentence.
    """

    name: str
    special: SpecialTokens | None
    missing: tuple[str, ...]
    is_special: np.ndarray
    drawable: np.ndarray
    marks_words: bool
    joins_before: np.ndarray
    joins_after: np.ndarray
    ends: np.ndarray

    def starts_words(self, ids: np.ndarray) -> np.ndarray:
        """Where words start.

        Bytes belong to one word when both are letters, digits, underscores or parts of a character beyond ASCII. A
        WordPiece token with ## continues the word before it; so does a token of byte-level BPE or SentencePiece without
        whitespace between it and the token before (as in RoBERTa: full stops and commas are part of a word). The
        first token and special tokens start words, and every token where the vocabulary marks no words.

        Args:
          ids: integers, [tokens], all in the vocabulary.

        Returns:
          bool[tokens].
        """
        starts = ~self.joins_before[ids]
        starts[1:] |= ~self.joins_after[ids[:-1]]
        starts[:1] = True
        return starts

    def ends_sentences(self, ids: np.ndarray) -> np.ndarray:
        """Which tokens end a sentence: they have a newline in them or end in . ! ? 。！？, bool[tokens]."""
        return self.ends[ids]

    def checked(self, ids: np.ndarray) -> np.ndarray:
        """`ids` as int32[tokens]; raises DataError when one is outside the vocabulary."""
        if ids.max(initial=0) >= len(self.ends):
            raise DataError(
                f"the data has token {ids.max()}, and data.tokenizer={self.name!r} has {len(self.ends)} tokens: the "
                "tokens were made by another. Set data.tokenizer to the one that made them."
            )
        return np.asarray(ids, np.int32)


class _ByteVocabulary(Vocabulary):
    """Bytes, of which 。！？ take three each."""

    def ends_sentences(self, ids: np.ndarray) -> np.ndarray:
        """Which bytes end a sentence: a newline, or the last byte of . ! ? 。！？, bool[bytes]."""
        ends = self.ends[ids]
        for mark in _SENTENCE_ENDS:
            if len(wide := mark.encode()) == 3:
                ends[2:] |= (ids[:-2] == wide[0]) & (ids[1:-1] == wide[1]) & (ids[2:] == wide[2])
        return ends


def byte_vocabulary() -> Vocabulary:
    """The 256 bytes; special are 0 and three bytes that UTF-8 never uses."""
    special = SpecialTokens(pad=0, cls=0xFE, sep=0xFD, mask=0xFF)
    is_special = np.zeros(256, bool)
    is_special[list(special)] = True
    unused = [0xC0, 0xC1, *range(0xF5, 0x100)]  # in UTF-8
    in_words = np.array([byte >= 0x80 or chr(byte).isalnum() or byte == ord("_") for byte in range(256)])
    in_words &= ~is_special
    return _ByteVocabulary(
        name="bytes",
        special=special,
        missing=(),
        is_special=is_special,
        drawable=np.setdiff1d(np.flatnonzero(~is_special), unused).astype(np.int32),
        marks_words=True,
        joins_before=in_words,
        joins_after=in_words,
        ends=np.isin(np.arange(256), list(b"\n.!?")),
    )


def json_vocabulary(tokenizer: tokenizers.Tokenizer, *, name: str) -> Vocabulary:
    """The vocabulary of a tokenizer of the `tokenizers` library; `name` is its path."""
    ids = tokenizer.get_vocab(with_added_tokens=True)
    size = max(ids.values(), default=-1) + 1
    special, missing = _find_special(ids)
    is_special = np.zeros(size, bool)
    is_special[[i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special]] = True
    is_special[list(special or ())] = True
    if (unknown := getattr(tokenizer.model, "unk_token", None)) in ids:
        is_special[ids[unknown]] = True
    exists = np.zeros(size, bool)
    exists[list(ids.values())] = True
    texts, marks_words = _texts(tokenizer)
    joins_before, joins_after, ends = np.zeros((3, size), bool)
    for i, text in texts.items():
        joins_before[i] = marks_words and text[:1].strip() != ""
        joins_after[i] = marks_words and text[-1:].strip() != ""
        ends[i] = "\n" in text or text.endswith(_SENTENCE_ENDS)
    return Vocabulary(
        name=name,
        special=special,
        missing=missing,
        is_special=is_special,
        drawable=np.flatnonzero(exists & ~is_special).astype(np.int32),
        marks_words=marks_words,
        joins_before=joins_before & ~is_special,
        joins_after=joins_after & ~is_special,
        ends=ends,
    )


def _find_special(ids: Mapping[str, int]) -> tuple[SpecialTokens | None, tuple[str, ...]]:
    """The special tokens among `ids`, or the names that the family with the most of them lacks."""
    lacking = [tuple(name for name in names if name not in ids) for names in SPECIAL_NAMES]
    missing, names = min(zip(lacking, SPECIAL_NAMES, strict=True), key=lambda pair: len(pair[0]))
    return (None, missing) if missing else (SpecialTokens(*(ids[name] for name in names)), ())


def _texts(tokenizer: tokenizers.Tokenizer) -> tuple[dict[int, str], bool]:
    """Each token's text by id, with a space before it where it begins a word, and whether the vocabulary tells that."""
    model = tokenizer.model
    tokens = {i: token for token, i in tokenizer.get_vocab(with_added_tokens=False).items()}
    if prefix := getattr(model, "continuing_subword_prefix", None):  # ## of WordPiece
        return {i: f" {token}".removeprefix(f" {prefix}") for i, token in tokens.items()}, True
    if isinstance(model, models.WordLevel):
        return {i: f" {token}" for i, token in tokens.items()}, True
    # Byte-level BPE writes bytes as letters, and ▁ is not one of them; Ġ may well be a letter of SentencePiece's.
    if any(token.startswith("▁") for token in tokens.values()):
        return {i: _BYTE_TOKEN.sub(_byte_text, token).replace("▁", " ") for i, token in tokens.items()}, True
    if any("Ġ" in token for token in tokens.values()):
        decode = decoders.ByteLevel().decode
        return {i: decode([token]) for i, token in tokens.items()}, True
    return tokens, False


def _byte_text(match: re.Match[str]) -> str:
    return bytes([int(match[1], 16)]).decode("utf-8", errors="replace")
