"""Examples of labelled texts, in BERT's form (arXiv:1810.04805, section 4): [CLS] A [SEP], or [CLS] A [SEP] B [SEP].

All texts are encoded once, at construction, which also detects texts that are too long. An example is assembled when it
is requested, and is the same in every epoch.
"""

import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from fiddlex.data.bad_lines import BadLineError
from fiddlex.data.labelled_texts import TaskRow
from fiddlex.data.ragged import Ragged, encode_rows
from fiddlex.data.staged_examples import checked
from fiddlex.data.statistics import class_shares
from fiddlex.data.tables import Table
from fiddlex.data.tokenizers import Tokenizer, warn_of_unknown
from fiddlex.errors import ConfigError
from fiddlex.terminal.readable import counted


class PairTokens(Protocol):
    """The special tokens around texts."""

    @property
    def pad(self) -> int:
        """Pads an example."""

    @property
    def cls(self) -> int:
        """Begins an example."""

    @property
    def sep(self) -> int:
        """Ends each text."""


class _TaskExamples:
    """What classification and multiple-choice examples have in common."""

    _seq_len: int
    _special: PairTokens

    def _store(
        self,
        table: Table[tuple[list[np.ndarray], int]],
        *,
        tokenizer: Tokenizer,
        num_cut: int,
        answers: Sequence[str],
    ) -> None:
        self._texts = Ragged([ids for row, _ in table.rows for ids in row])
        warn_of_unknown(self._texts.tokens, tokenizer, table.source)
        self.labels = np.array([label for _, label in table.rows], np.int32)  # the classes or right choices
        # The number of each example's line in the file, from 1; the names of the classes or choices.
        self.lines, self.answers = table.lines, tuple(answers)
        self.shares = class_shares(self.labels, len(answers))  # of each answer among the labels
        self.num_cut = num_cut  # lines with a text that was cut
        common = int(np.argmax(self.shares))
        self._description = (
            f"{table.describe()}, {num_cut:,} cut to model.seq_len={self._seq_len}; always answering "
            f"{answers[common]!r} would be right for {self.shares[common]:.1%}"
        )

    def __len__(self) -> int:
        return len(self.labels)

    def fingerprint(self) -> str:
        """Identifies the data by the number of examples and a hash of all tokens and labels."""
        digest = hashlib.sha256(self._texts.digest().encode())
        digest.update(self.labels.astype("<i4").tobytes())
        return f"{len(self)}-{digest.hexdigest()[:16]}"

    def describe(self) -> str:
        return self._description

    def _labelled(self, index: int, rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return rows | {"labels": np.array(self.labels[index]), "label_weights": np.ones((), np.float32)}


class ClassificationExamples(_TaskExamples):
    """One text or a pair, and a class.

    With `truncate`, an example that is too long loses tokens from the end of its longer text, one by one, as in BERT's
    published code; of two texts of equal length the second loses a token. Otherwise it is a bad line.
    """

    def __init__(
        self,
        table: Table[TaskRow],
        *,
        classes: Sequence[str],
        tokenizer: Tokenizer,
        special: PairTokens,
        seq_len: int,
        truncate: bool,
    ):
        self._seq_len, self._special = seq_len, special
        self._num_texts = max((len(row.texts) for row in table.rows), default=1)
        room = _room(seq_len, self._num_texts)
        encoded, num_cut = encode_rows((row.texts for row in table.rows), tokenizer), 0

        def fit(row: TaskRow) -> tuple[list[np.ndarray], int]:
            nonlocal num_cut
            texts = next(encoded)
            if sum(map(len, texts)) > room:
                if not truncate:
                    raise _too_long(sum(map(len, texts)), room=room, seq_len=seq_len, whose="the longer text")
                num_cut += 1
                texts = _cut_longer(texts, room)
            return texts, row.label

        self._store(table.convert(fit), tokenizer=tokenizer, num_cut=num_cut, answers=classes)

    def example(self, index: int, *, epoch: int) -> dict[str, np.ndarray]:
        """Example `index`, the same in every epoch.

        It has `tokens` int32[seq_len]; `segments` int32[seq_len], 1 on tokens and 0 on padding; `token_types`
        int32[seq_len], 1 on the second text and the separator after it; `labels` int32[], the class; `label_weights`
        float32[], 1.
        """
        checked(index, len(self))
        texts = [self._texts[index * self._num_texts + i] for i in range(self._num_texts)]
        rows = {name: np.zeros(self._seq_len, np.int32) for name in ("tokens", "segments", "token_types")}
        _write(texts, self._special, rows)
        return self._labelled(index, rows)


class MultipleChoiceExamples(_TaskExamples):
    """A context, and choices of which one is right.

    Each choice makes a pair A, B. A is the context, which is the first text. B is the second text, a space and the
    choice, or the choice alone if there is no second text.

    With `truncate`, the context of a pair that is too long is cut at its end. Question and choice are never cut; if
    they leave no room for a token of the context, the line is bad. Without, any pair that is too long makes its line
    bad.
    """

    def __init__(
        self, table: Table[TaskRow], *, tokenizer: Tokenizer, special: PairTokens, seq_len: int, truncate: bool
    ):
        self._seq_len, self._special = seq_len, special
        self._num_choices = max((len(row.choices) for row in table.rows), default=0)
        self._room = room = _room(seq_len, 2)
        encoded, num_cut = encode_rows(map(_context_and_answers, table.rows), tokenizer), 0

        def fit(row: TaskRow) -> tuple[list[np.ndarray], int]:
            nonlocal num_cut
            context, *answers = next(encoded)
            longest = max(map(len, answers))
            if len(context) + longest > room:
                if not truncate:
                    raise _too_long(len(context) + longest, room=room, seq_len=seq_len, whose="the context")
                if longest >= room:
                    raise BadLineError(
                        "too long",
                        f"question and choice take {longest} tokens, which with [CLS], two [SEP] and a token of the "
                        f"context is more than model.seq_len={seq_len}, and only the context is cut. Raise "
                        "model.seq_len.",
                    )
                num_cut += 1
            return [context[:room], *answers], row.label

        answers = [f"choice {i}" for i in range(self._num_choices)]
        self._store(table.convert(fit), tokenizer=tokenizer, num_cut=num_cut, answers=answers)

    def example(self, index: int, *, epoch: int) -> dict[str, np.ndarray]:
        """Example `index`, the same in every epoch.

        It has `tokens`, `segments` and `token_types` as in `ClassificationExamples`, but int32[num_choices, seq_len];
        `labels` int32[], the index of the right choice; `label_weights` float32[], 1.
        """
        checked(index, len(self))
        first = index * (1 + self._num_choices)
        context = self._texts[first]
        shape = (self._num_choices, self._seq_len)
        rows = {name: np.zeros(shape, np.int32) for name in ("tokens", "segments", "token_types")}
        for choice in range(self._num_choices):
            answer = self._texts[first + 1 + choice]
            pair = [context[: self._room - len(answer)], answer]
            _write(pair, self._special, {name: values[choice] for name, values in rows.items()})
        return self._labelled(index, rows)


def _write(texts: Sequence[np.ndarray], special: PairTokens, rows: dict[str, np.ndarray]) -> None:
    """Writes a text or a pair into `tokens`, `segments` and `token_types`, arrays of zeros, [seq_len] each."""
    tokens = rows["tokens"]
    tokens[0], end = special.cls, 1
    for token_type, ids in enumerate(texts):
        start, end = end, end + len(ids) + 1
        tokens[start : end - 1], tokens[end - 1] = ids, special.sep
        rows["token_types"][start:end] = token_type
    tokens[end:] = special.pad
    rows["segments"][:end] = 1


def _context_and_answers(row: TaskRow) -> list[str]:
    context, *question = row.texts
    return [context, *(" ".join((*question, choice)) for choice in row.choices)]


def _cut_longer(texts: Sequence[np.ndarray], room: int) -> list[np.ndarray]:
    """Cuts one text or two to `room` tokens, one token at a time from the end of the longer text."""
    if len(texts) == 1:
        return [texts[0][:room]]
    first, second = texts
    kept = min(len(second), max(room - len(first), room // 2))
    return [first[: room - kept], second[:kept]]


def _room(seq_len: int, num_texts: int) -> int:
    """Tokens of text that fit in an example in addition to [CLS] and a [SEP] for each text."""
    room = seq_len - 1 - num_texts
    if room < num_texts:
        raise ConfigError(
            f"model.seq_len={seq_len} has no room for {counted(num_texts, 'text')} beside [CLS] and a [SEP] "
            f"after each. Use at least {1 + 2 * num_texts}."
        )
    return room


def _too_long(length: int, *, room: int, seq_len: int, whose: str) -> BadLineError:
    around = seq_len - room
    return BadLineError(
        "too long",
        f"its texts take {length + around} tokens, [CLS] and [SEP] included, more than model.seq_len={seq_len}. Set "
        f"data.truncate=True to cut {whose} at its end, or raise model.seq_len.",
    )
