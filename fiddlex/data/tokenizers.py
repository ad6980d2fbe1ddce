"""Text to token ids and back.

Invariant: every id that `encode` returns lies in [0, vocab_size), and encoding adds nothing to the text: no special
tokens, no padding, no truncation. `corpus` joins documents and puts `separator` between them.
"""

import contextlib
import functools
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np
import tokenizers

from fiddlex.data.named_tokens import end_ids, special_names
from fiddlex.data.token_kinds import SPECIAL_NAMES, SpecialTokens, Vocabulary, byte_vocabulary, json_vocabulary
from fiddlex.errors import ConfigError, DataError, is_failure
from fiddlex.files.places import absolute

logger = logging.getLogger(__name__)

MOST_UNKNOWN = 0.05  # share of unknown tokens above which a tokenizer probably does not suit a text
MOST_IDS = 2**24  # of a vocabulary, with gaps; the largest that are published have 2²⁰
_COUNTED_AT_ONCE = 2**22  # tokens, so that a memory map is never wholly in memory
_UNKNOWN_NAMES = ("[UNK]", "<unk>")

# Names of the end of text in the vocabularies of GPT, Llama 3, RoBERTa/T5 and BERT, in the order of the search.
END_OF_TEXT = "<|endoftext|>"
SEPARATORS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "[SEP]")


class Tokenizer(Protocol):
    """The interface of tokenizers in fiddlex."""

    @property
    def vocab_size(self) -> int:
        """Number of ids: the largest id plus one."""

    @property
    def separator(self) -> int | None:
        """The token put between documents, if the vocabulary has one."""

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end a text that is generated: `separator`, and those that the tokenizer's files name.

        Training puts the separator after each document, so a text ends there even where a file names another token.
        """

    @property
    def unknown(self) -> int | None:
        """The token for text that the vocabulary cannot encode, if the vocabulary has one."""

    @property
    def beginning(self) -> list[int]:
        """The tokens that begin a text where the tokenizer's file says so (Llama); training does not use them."""

    @property
    def vocabulary(self) -> Vocabulary:
        """Facts about the tokens: which are special, start words or end sentences."""

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`, int32[tokens]."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text, possibly in parallel."""

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids`."""


class ByteTokenizer:
    """One token per UTF-8 byte. Byte 0, which text does not use, is the separator between documents and the padding.

    Three bytes that UTF-8 never uses are BERT's special tokens: 0xFD ends a sentence, 0xFE begins an example, 0xFF
    masks.
    """

    vocab_size = 256
    separator = 0
    ends: ClassVar[frozenset[int]] = frozenset({0})
    unknown = None
    beginning: ClassVar[list[int]] = []

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        return byte_vocabulary()

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids`; bytes that are not UTF-8, as in a sample cut short, become U+FFFD."""
        return bytes(np.asarray(ids, np.uint8)).decode("utf-8", errors="replace")


class JsonTokenizer:
    """A `tokenizer.json` of the Hugging Face `tokenizers` library.

    A separator that is written out in the text (`<|endoftext|>` between stories) is read as that token, as authors of
    such files intend.

    Raises:
      DataError: when there is no such file or it is not a tokenizer.
    """

    def __init__(self, path: str | Path):
        file = str(absolute(path))
        if not os.path.isfile(file):
            raise DataError(
                f"data.tokenizer={str(path)!r}: {file} {'is a folder' if os.path.isdir(file) else 'does not exist'}. "
                "Use 'bytes' or the path of a tokenizer.json of the tokenizers library; name one that was moved with "
                "--config.data.tokenizer=PATH."
            )
        self._path = str(path)
        with self._library("is not a JSON file of the tokenizers library"):
            self._tokenizer = tokenizers.Tokenizer.from_file(file)
        # A file may set truncation and padding for another use; a corpus needs neither.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        # This is not the number of entries: vocabularies may have gaps, and embeddings are indexed by id.
        self.vocab_size: int = max(vocab.values(), default=-1) + 1
        if self.vocab_size > MOST_IDS:
            raise DataError(
                f"data.tokenizer={self._path!r} has a token with the id {self.vocab_size - 1:,}, and ids must be below "
                f"{MOST_IDS:,}: tables and embeddings have a row for each id. Number its tokens from 0 on."
            )
        self.separator: int | None = next((vocab[name] for name in SEPARATORS if name in vocab), None)
        named = {vocab.get(special_names(Path(file)).get("eos_token", "")), *end_ids(Path(file))}
        self.ends = frozenset(id for id in named | {self.separator} if id is not None and 0 <= id < self.vocab_size)
        names = (getattr(self._tokenizer.model, "unk_token", None), *_UNKNOWN_NAMES)
        self.unknown: int | None = next((vocab[name] for name in names if name in vocab), None)
        with self._library("cannot encode a text"):
            probe = self._tokenizer.encode("a")
        self.beginning: list[int] = probe.ids[: next((i for i, part in enumerate(probe.sequence_ids) if part == 0), 0)]

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        """Cached: computing it takes part of a second for a large vocabulary."""
        return json_vocabulary(self._tokenizer, name=self._path)

    def encode(self, text: str) -> np.ndarray:
        with self._library("cannot encode a text"):
            return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text, on all cores."""
        with self._library("cannot encode a text"):
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids`, separators included."""
        with self._library("cannot decode tokens"):
            return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False)

    @contextlib.contextmanager
    def _library(self, problem: str) -> Iterator[None]:
        """Turns what the library raises into a DataError: plain Exceptions, and panics."""
        try:
            yield
        except BaseException as error:
            if not is_failure(error):
                raise
            reason = str(error) if len(str(error)) <= 300 else f"{str(error)[:300]}…"
            raise DataError(
                f"data.tokenizer={self._path!r} {problem} ({reason}). Write one with tokenizers.Tokenizer.save, or use "
                "the model's tokenizer.json, not its vocab.json."
            ) from error


def begun(ids: Sequence[int], beginning: Sequence[int]) -> list[int]:
    """The tokens of a text that begins with `Tokenizer.beginning`, which is put before it unless it is there."""
    return [*ids] if [*ids[: len(beginning)]] == [*beginning] else [*beginning, *ids]


def make_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names: 'bytes', or the path of a JSON file of the `tokenizers` library.

    Raises:
      ConfigError: when `spec` is empty.
      DataError: when the path is not such a file.
    """
    if not spec:
        raise ConfigError("data.tokenizer is empty. Use 'bytes' or the path of a tokenizer.json.")
    return ByteTokenizer() if spec == "bytes" else JsonTokenizer(spec)


def tokenizer_digest(spec: str) -> str:
    """A text that differs for tokenizers that differ: 'bytes', or a hash of the JSON in the file of `data.tokenizer`.

    A file that cannot be read has the reason in place of a hash; `make_tokenizer` raises an error for it.
    """
    if spec == "bytes":
        return spec
    path = os.path.expanduser(spec)
    try:
        state = os.stat(path)
        return _json_digest(path, state.st_mtime_ns, state.st_size)
    except OSError as error:
        return error.strerror or type(error).__name__


@functools.lru_cache(maxsize=8)
def _json_digest(path: str, *state: int) -> str:
    """A hash of the JSON in a file of some state, however it is indented; of its bytes where it has none."""
    text = Path(path).read_bytes()
    with contextlib.suppress(ValueError, RecursionError):
        text = json.dumps(json.loads(text)).encode()
    return hashlib.sha256(text).hexdigest()[:16]


def require_special(tokenizer: Tokenizer | None) -> SpecialTokens:
    """The special tokens, which BERT's examples need; raises DataError without a tokenizer or any of the tokens."""
    if tokenizer is None:
        raise DataError(
            "the tokenizer of these tokens is not known, and BERT's examples take its special tokens. Set "
            "data.tokenizer to the tokenizer.json that made them."
        )
    vocabulary = tokenizer.vocabulary
    if vocabulary.special is None:
        bert, roberta = (f"{', '.join(names[:-1])} and {names[-1]}" for names in SPECIAL_NAMES)
        raise DataError(
            f"data.tokenizer={vocabulary.name!r} is a vocabulary without {', '.join(vocabulary.missing)}: BERT's "
            f"examples take {bert} (or {roberta}). Add them (tokenizers.Tokenizer.add_special_tokens, then save) and "
            "raise model.vocab_size by as many, or use data.tokenizer=bytes."
        )
    return vocabulary.special


def warn_of_unknown(ids: np.ndarray, tokenizer: Tokenizer, source: str) -> None:
    """Logs a warning when more than `MOST_UNKNOWN` of the tokens of `source`, integers [tokens], are unknown."""
    if tokenizer.unknown is None or not len(ids):
        return
    starts = range(0, len(ids), _COUNTED_AT_ONCE)
    share = sum(np.count_nonzero(ids[i : i + _COUNTED_AT_ONCE] == tokenizer.unknown) for i in starts) / len(ids)
    if share > MOST_UNKNOWN:
        logger.warning(
            "%s: of %s tokens %.1f%% are the unknown token of data.tokenizer=%s, which was made for other text. Train "
            "one on text like this, or name another.",
            *(source, f"{len(ids):,}", 100 * share, tokenizer.vocabulary.name),
        )


class PieceDecoder:
    """Decodes tokens as they arrive, each a few times at most, to pieces of whole characters.

    `after` are the tokens before them, which are whole characters; a tokenizer may treat the first token of a text
    differently.
    """

    def __init__(self, tokenizer: Tokenizer, after: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._shown, self._waiting, self._text = list(after), list[int](), ""

    def push(self, token: int) -> str:
        """The text that one more token adds; empty if that may be a part of a character, which then waits for more."""
        self._waiting.append(token)
        decode = self._tokenizer.decode
        self._text = decode(self._shown + self._waiting)[len(decode(self._shown)) :]
        return "" if self._text.endswith("\ufffd") else self.flush()

    def flush(self) -> str:
        """The text of the tokens that wait; U+FFFD stands for a character that is incomplete."""
        piece = self._text
        if piece:
            self._shown, self._waiting, self._text = self._waiting, [], ""
        return piece
