"""The kinds of a vocabulary's tokens: which tokens are special, begin words or end sentences.

Invariant: the facts are arrays indexed by id, computed once from the vocabulary. Word boundaries are found from pairs
of neighbouring tokens; no text is decoded.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import tokenizers
from tokenizers import decoders, models

from fiddlex.errors import DataError

# The names of pad, cls, sep and mask in BERT and RoBERTa.
SPECIAL_NAMES = (("[PAD]", "[CLS]", "[SEP]", "[MASK]"), ("<pad>", "<s>", "</s>", "<mask>"))
_SENTENCE_ENDS = (".", "!", "?", "。", "！", "？")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # SentencePiece's name of a byte that no other token covers


class SpecialTokens(NamedTuple):
    """Ids of the tokens that BERT's examples have in addition to the text."""

    pad: int  # pads an example
    cls: int  # begins an example, or each document of a packed example
    sep: int  # ends each sentence of a pair, or each document
    mask: int  # replaces a token to be predicted


@dataclasses.dataclass(frozen=True, eq=False)
class Vocabulary:
    """Facts about the tokens of one tokenizer."""

    name: str  # the value of `data.tokenizer`
    special: SpecialTokens | None  # None when the vocabulary lacks any of them
    missing: tuple[str, ...]  # names of the special tokens that the vocabulary lacks
    is_special: np.ndarray  # bool[ids]: special tokens, and others that are not text ([UNK]); they are never masked
    drawable: np.ndarray  # int32[n]: the ids that may replace a masked token; all except special and unused ones
    marks_words: bool  # whether the vocabulary marks where words begin
    joins_before: np.ndarray  # bool[ids]: in one word with the token before it, if that one's `joins_after` is True
    joins_after: np.ndarray  # bool[ids]: in one word with the token after it, if that one's `joins_before` is True
    ends: np.ndarray  # bool[ids]: whether the token ends a sentence

    def starts_words(self, ids: np.ndarray) -> np.ndarray:
        """Which of `ids`, integers [tokens], start words: bool[tokens].

        Two neighbouring bytes belong to one word when both are letters, digits, underscores or parts of a character
        beyond ASCII. A WordPiece token with ## continues the word before it. A token of byte-level BPE or SentencePiece
        continues the word before it when no whitespace separates the two (as in RoBERTa: full stops and commas are part
        of a word). The first token and special tokens start words; if the vocabulary marks no words, every token does.
        """
        starts = ~self.joins_before[ids]
        starts[1:] |= ~self.joins_after[ids[:-1]]
        starts[:1] = True
        return starts

    def ends_sentences(self, ids: np.ndarray) -> np.ndarray:
        """Which tokens end a sentence, bool[tokens]: those that contain a newline or end in . ! ? 。！？."""
        return self.ends[ids]

    def checked(self, ids: np.ndarray) -> np.ndarray:
        """`ids` as int32[tokens]; raises DataError when one is outside the vocabulary."""
        wrong = (ids >= len(self.ends)) | (ids < 0)
        if wrong.any():
            raise DataError(
                f"the data has token {ids[wrong][0]}, and data.tokenizer={self.name!r} has {len(self.ends)} tokens: "
                "the tokens were made by another. Set data.tokenizer to the one that made them."
            )
        return np.asarray(ids, np.int32)


class _ByteVocabulary(Vocabulary):
    """The vocabulary of bytes, in which each of 。！？ takes three bytes."""

    def ends_sentences(self, ids: np.ndarray) -> np.ndarray:
        """Which bytes end a sentence, bool[bytes]: a newline, or the last byte of one of . ! ? 。！？."""
        ends = self.ends[ids]
        for mark in _SENTENCE_ENDS:
            if len(wide := mark.encode()) == 3:
                ends[2:] |= (ids[:-2] == wide[0]) & (ids[1:-1] == wide[1]) & (ids[2:] == wide[2])
        return ends


def byte_vocabulary() -> Vocabulary:
    """The 256 bytes; byte 0 and three bytes that UTF-8 never uses are special."""
    special = SpecialTokens(pad=0, cls=0xFE, sep=0xFD, mask=0xFF)
    is_special = np.zeros(256, bool)
    is_special[list(special)] = True
    unused = [0xC0, 0xC1, *range(0xF5, 0x100)]  # bytes that UTF-8 never uses
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
    """The special tokens among `ids`; if no family is complete, the missing names of the one that lacks the fewest."""
    lacking = [tuple(name for name in names if name not in ids) for names in SPECIAL_NAMES]
    missing, names = min(zip(lacking, SPECIAL_NAMES, strict=True), key=lambda pair: len(pair[0]))
    return (None, missing) if missing else (SpecialTokens(*(ids[name] for name in names)), ())


def _texts(tokenizer: tokenizers.Tokenizer) -> tuple[dict[int, str], bool]:
    """Each token's text by id, with a space before tokens that begin words, and whether the vocabulary marks words."""
    model = tokenizer.model
    tokens = {i: token for token, i in tokenizer.get_vocab(with_added_tokens=False).items()}
    if prefix := getattr(model, "continuing_subword_prefix", None):  # WordPiece's ##
        return {i: f" {token}".removeprefix(f" {prefix}") for i, token in tokens.items()}, True
    if isinstance(model, models.WordLevel):
        return {i: f" {token}" for i, token in tokens.items()}, True
    # Byte-level BPE writes bytes as letters, and ▁ is not one of them; but Ġ can be a letter in SentencePiece.
    if any(token.startswith("▁") for token in tokens.values()):
        return {i: _BYTE_TOKEN.sub(_byte_text, token).replace("▁", " ") for i, token in tokens.items()}, True
    if any("Ġ" in token for token in tokens.values()):
        decode = decoders.ByteLevel().decode
        return {i: decode([token]) for i, token in tokens.items()}, True
    return tokens, False


def _byte_text(match: re.Match[str]) -> str:
    return bytes([int(match[1], 16)]).decode("utf-8", errors="replace")
